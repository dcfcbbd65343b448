"""Collectives of ranks on one host: shared memory beside gloo, in turns in the same processes.

Each turn is a few calls through one backend; turns alternate, so that a slow moment of the machine meets both, and only
one backend is at work at a time. A time is that of the slowest rank. `--load` keeps every core busy with other work.

    torchrun --standalone --nproc_per_node=2 benchmarks/cpu_collectives.py
    torchrun --standalone --nproc_per_node=4 benchmarks/cpu_collectives.py --load
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist

import colossal
from colossal.cluster import DistCoordinator

Call = Callable[[dist.ProcessGroup], object]
SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24, "64 MB": 2**26}
BARS = {
    "1 KB": {"all_reduce": 0.2, "all_gather": 0.2, "reduce_scatter": 0.2},
    "64 MB": {"all_reduce": 0.33, "all_gather": 0.2, "reduce_scatter": 0.2},
}
LARGE = 2**20

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def buffers(num_bytes: int, size: int) -> list[torch.Tensor]:
    """Two tensors of the whole size, and a part; as in the tables of peers, the size is that of the whole."""
    return [torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4 // size)]


def calls(whole: torch.Tensor, other: torch.Tensor, part: torch.Tensor) -> dict[str, Call]:
    """The collectives on float32 tensors."""
    size = whole.numel() // part.numel()

    def sum_after_exchange(group: dist.ProcessGroup) -> None:
        dist.all_to_all_single(other, whole, group=group)
        torch.sum(other.view(size, -1), dim=0, out=part)

    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "all_gather": lambda group: all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda group: reduce_scatter_single(part, whole, group=group),
        "all_to_all, sum": sum_after_exchange,
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, src=0, group=group),
        "send, recv": lambda group: pass_on(whole, group),
    }


def pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send from rank 0 to rank 1 and back."""
    rank = dist.get_rank()
    if rank <= 1:
        for sender in (0, 1):
            dist.send(tensor, 1 - rank, group=group) if rank == sender else dist.recv(tensor, 1 - rank, group=group)


def check(groups: dict[str, dist.ProcessGroup], size: int) -> None:
    """Compare what the collectives of the groups leave behind, from numbers that both add without rounding."""
    tensors = buffers(2**12, size)
    for name, call in calls(*tensors).items():
        left: list[list[torch.Tensor]] = []
        for group in groups.values():
            for tensor in tensors:
                torch.arange(tensor.numel(), out=tensor).add_(dist.get_rank())
            call(group)
            left.append([tensor.clone() for tensor in tensors])
        assert all(map(torch.equal, *left)), f"{name} leaves something else on {' than on '.join(groups)}"


def new_group(backend: str) -> dist.ProcessGroup:
    """All ranks, with their own connections."""
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def race(call: Call, groups: dict[str, dist.ProcessGroup], turns: int, repeats: int) -> dict[str, list[float]]:
    """Time a call through each group, in microseconds; the first two turns warm up."""
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(-2, turns):
        for name in sorted(groups, reverse=turn % 2 == 0):
            dist.barrier()
            for _ in range(repeats):
                started = time.perf_counter()
                call(groups[name])
                if turn >= 0:
                    times[name].append(1e6 * (time.perf_counter() - started))
    return {name: slowest(values) for name, values in times.items()}


def slowest(values: list[float]) -> list[float]:
    """Return the time of the slowest rank, for each call."""
    found = torch.tensor(values)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


@contextmanager
def other_work(*, wanted: bool) -> Iterator[None]:
    """Keep every core busy with a process of rank 0's."""
    workers = []
    if wanted and dist.get_rank() == 0:
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for worker in workers:
        worker.start()
    yield
    for worker in workers:
        worker.kill()


def _spin() -> None:
    while True:
        sum(range(10_000))


def report(size_name: str, name: str, times: dict[str, list[float]]) -> str:
    """One line of the table."""
    gloo, shm = (statistics.median(times[backend]) for backend in ("gloo", "shm"))
    bar = dict(BARS.get(size_name, {})).get(name)
    verdict = f"   bar {bar}: {'met' if shm <= bar * gloo else 'MISSED'}" if bar else ""
    least = f"(least {min(times['gloo']):.0f}, {min(times['shm']):.0f})"
    return f"{size_name:>6} {name:<16} {gloo:10.0f} {shm:10.0f} {shm / gloo:7.3f}   {least:<24}{verdict}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=40, help="turns of each backend at small sizes")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of these, separated by commas")
    parser.add_argument("--load", action="store_true", help="keep every core busy with other work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    colossal.launch_from_torch(verbose=False)
    size, printer = dist.get_world_size(), DistCoordinator().print_on_master
    groups = {name: new_group(name) for name in ("shm", "gloo")}
    printer(
        f"{size} ranks on {os.cpu_count()} cores{', which do other work' * options.load}; "
        "medians in us of the slowest rank"
    )
    printer(f"{'size':>6} {'collective':<16} {'gloo':>10} {'shm':>10} {'ratio':>7}")
    check(groups, size)
    with other_work(wanted=options.load):
        for size_name in options.sizes.split(","):
            num_bytes = SIZES[size_name]
            turns, repeats = (options.turns, 10) if num_bytes < LARGE else (max(6, options.turns // 2), 1)
            for name, call in calls(*buffers(num_bytes, size)).items():
                printer(report(size_name, name, race(call, groups, turns, repeats)))


if __name__ == "__main__":
    main()
