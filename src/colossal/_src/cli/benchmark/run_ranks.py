"""Runs a benchmark on the ranks that torchrun has started, or on ranks that it starts itself."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

import click

from colossal._src.cli.benchmark.measure import Result, measure_cases, measure_links
from colossal._src.cli.benchmark.settings import LinkSettings, Settings
from colossal._src.cli.ranks import Outcome, run_ranks

RANK = "colossal._src.cli.benchmark.rank"


@final
class BenchmarkError(click.ClickException):
    """A rank failed, or a benchmark took too long."""


def outer_world_size() -> int | None:
    """Return the world size if a launcher has started this command, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def run_cases(settings: Settings, sizes: Sequence[int], timeout_seconds: float) -> list[Result] | None:
    """Measure the cases for each number of ranks."""
    if outer_world_size() is not None:
        mesh = _join(settings.device)
        results = measure_cases(settings, mesh)
        return results if os.environ["RANK"] == "0" else None
    found: list[Result] = []
    for size in sizes:
        outcomes = _start("cases", settings.as_word(), size, settings.device, timeout_seconds)
        found += [Result(**one) for one in outcomes[0].reports[-1]["results"]]
    return found


def run_links(settings: LinkSettings, timeout_seconds: float) -> bool:
    """Measure the links of a mesh and write the file."""
    if outer_world_size() is not None:
        _join(settings.device)
        measure_links(settings)
        return os.environ["RANK"] == "0"
    size = 1
    for ranks in settings.shape.values():
        size *= ranks
    _start("links", settings.as_word(), size, settings.device, timeout_seconds)
    return True


def _join(device: str) -> int:
    """Join the launcher's process group; return the world size."""
    from colossal._src.cluster import launch_from_torch

    os.environ["COLOSSAL_DEVICE"] = device
    return launch_from_torch(verbose=False).world_size


def _start(kind: str, word: str, size: int, device: str, timeout_seconds: float) -> list[Outcome]:
    """Start ranks that measure, each with an equal number of cores."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // size))
    environment = {"COLOSSAL_DEVICE": device, "OMP_NUM_THREADS": threads}
    outcomes = run_ranks(RANK, size, [kind, word], timeout_seconds=timeout_seconds, environment=environment)
    failed = sorted((one for one in outcomes if one.code != 0), key=lambda one: (one.code is None, one.rank))
    if failed:
        first = failed[0]
        how = f"was ended after {timeout_seconds:g} s" if first.code is None else f"ended with code {first.code}"
        raise BenchmarkError(f"Of {size} ranks, rank {first.rank} {how}. The last it printed:\n{first.printed}")
    return outcomes


def working_path(path: str) -> str:
    """Make a path absolute, and refuse one whose folder does not exist before anything is measured."""
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise click.BadParameter(f"there is no folder {target.parent}", param_hint="--output")
    return str(target)
