"""How long the cases of a benchmark take, on ranks that are running."""

import statistics
import time
from dataclasses import dataclass
from typing import Any, final

from colossal._src.cli.benchmark.cases import Case, Step, cases_of
from colossal._src.cli.benchmark.settings import LinkSettings, Settings

_MEBI = 2**20


@final
@dataclass(frozen=True)
class Result:
    """One measured case."""

    case: str  # what was computed
    parallelism: str  # how it was divided
    ranks: int  # number of ranks
    batch_per_rank: int  # samples on each rank
    seconds: float  # one step, the median; the slowest rank counts
    samples_per_second: float  # of all ranks together
    tflops: float  # floating-point operations in a second, of all ranks together, in 10^12
    memory_bytes: int  # the most that a rank held
    sent_bytes: int  # what a rank sent in a step, the most of all


def measure_cases(settings: Settings, world_size: int) -> list[Result]:
    """Measure every case that is made for this number of ranks."""
    return [_measure(settings, case) for case in cases_of(settings) if case.size == world_size]


def measure_links(settings: LinkSettings) -> None:
    """Measure the links of a mesh, and let rank 0 write the file."""
    from colossal._src.cluster import ParallelMesh, measure_link_cost

    mesh = ParallelMesh(**settings.shape)  # type: ignore[arg-type]
    costs = measure_link_cost(mesh, **settings.arguments())
    if mesh.global_rank == 0:
        costs.save(settings.output)


def _measure(settings: Settings, case: Case) -> Result:
    import torch

    from colossal._src import comm
    from colossal.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    with comm.CommCounter() as counter:
        step = case.prepare(settings, case.batch_per_rank)
        ahead = sum(counter.bytes.values())
        step()
        sent = sum(counter.bytes.values()) - ahead
    for _ in range(settings.warmup_steps):
        step()
    own = statistics.median(_seconds(step) for _ in range(settings.profile_steps))
    facts = torch.tensor([[own, accelerator.max_memory_allocated(), sent]], dtype=torch.float64, device="cpu")
    everyones = comm.gather(facts, "dp", dim=0)
    seconds, memory, most_sent = everyones.max(dim=0).values.tolist()
    return Result(
        case.name,
        case.parallelism,
        case.size,
        case.batch_per_rank,
        seconds,
        case.batch_size / seconds,
        case.flops / seconds / 1e12,
        int(memory),
        int(most_sent),
    )


def _seconds(step: Step) -> float:
    from colossal.accelerator import get_accelerator

    get_accelerator().synchronize()
    started = time.perf_counter()
    step()
    get_accelerator().synchronize()
    return time.perf_counter() - started


def speedup_of(result: Result, results: list[Result]) -> float | None:
    """How many times as many samples a second as one rank computes; None where no such case was measured."""
    single = [one for one in results if one.case == result.case and one.parallelism == "none"]
    return result.samples_per_second / single[0].samples_per_second if single else None


def is_fastest(result: Result, results: list[Result]) -> bool:
    """Whether nothing computes the same case with as many samples in less time; False where there is nothing else."""
    batch = round(result.samples_per_second * result.seconds)
    others = [
        one for one in results if one.case == result.case and round(one.samples_per_second * one.seconds) == batch
    ]
    return len(others) > 1 and result is min(others, key=lambda one: one.seconds)


def columns_of(result: Result, results: list[Result]) -> dict[str, Any]:
    """A result as the table shows it."""
    speedup = speedup_of(result, results)
    return {
        "case": result.case,
        "parallelism": result.parallelism,
        "ranks": str(result.ranks),
        "batch/rank": str(result.batch_per_rank),
        "ms/step": f"{1000 * result.seconds:.2f}",
        "samples/s": f"{result.samples_per_second:.1f}",
        "TFLOP/s": f"{result.tflops:.3f}",
        "speed-up": "" if speedup is None else f"{speedup:.2f}",
        "MiB/rank": f"{result.memory_bytes / _MEBI:.0f}",
        "MiB sent": f"{result.sent_bytes / _MEBI:.2f}",
        "": "fastest" if is_fastest(result, results) else "",
    }
