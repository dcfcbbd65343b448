# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
"""How long collectives take along the axes of a mesh, measured."""

import datetime as dt
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import distributed as dist

from colossal._src.cluster.axes import AXES, Axis
from colossal._src.cluster.backends import host_group
from colossal._src.cluster.link_cost import LINK_OPS, AxisCost, LinkCost, LinkOp, LinkOrigin, Timings, fit_axis, typical
from colossal._src.cluster.mesh import ParallelMesh, current_mesh
from colossal.errors import ConfigError, UnsupportedError

DEFAULT_SIZES = tuple(4**power for power in range(5, 12))  # 1 KiB to 4 MiB
DEFAULT_SECONDS = 0.25
_PASSES, _WARM_UP, _LEAST, _MOST = 4, 2, 2, 50

_Collective = Callable[..., dist.Work | None]

# torch 2.13 renamed these two; 2.11 has only the old names.
_IS_RENAMED = hasattr(dist, "all_gather_single")
_all_gather_single: _Collective = getattr(dist, "all_gather_single" if _IS_RENAMED else "all_gather_into_tensor")
_reduce_scatter_single: _Collective = getattr(dist, "reduce_scatter_single" if _IS_RENAMED else "reduce_scatter_tensor")

# [Note: what is timed]
# A sample is a round of as many calls as there are ranks on the axis, one after the other and without a barrier: each
# collective waits for all ranks anyway. A broadcast does not, so every rank is its root once a round: it cannot send
# before it has received. In p2p each rank sends to the next and receives from the one before, as in a pipeline. All
# groups of an axis run at once, as they do in training. Everything is measured in a few passes, so that what else
# happens on the machine meanwhile does not fall on one size alone.


def measure_link_cost(
    mesh: ParallelMesh | None = None,
    ops: Sequence[LinkOp] = LINK_OPS,
    sizes: Sequence[int] = DEFAULT_SIZES,
    seconds: float = DEFAULT_SECONDS,
) -> LinkCost:
    """Measure the links along every axis of a mesh that has more than one rank.

    Args:
        mesh: The mesh; the ambient one by default.
        ops: The operations to measure.
        sizes: Bytes of the tensors; at least two sizes, which it takes to separate alpha from beta.
        seconds: How long to measure one operation with one size, about.

    Returns:
        The costs, the same on all ranks.

    Raises:
        ConfigError: An operation is unknown, or a size or the time makes no sense.
        UnsupportedError: The process group is a fake one, or has one rank.

    Communication: every operation and size some ten to two hundred rounds, every axis with more than one rank.

    Example:
        >>> from colossal.cluster import measure_link_cost
        >>> from colossal.testing import run_processes
        >>> costs, same = run_processes(measure_link_cost, 2, ops=["all_reduce"], sizes=[1024, 262144], seconds=0.01)
        >>> list(costs.axes), costs.axes["dp"].size, costs == same
        (['dp'], 2, True)
    """
    mesh = mesh or current_mesh()
    _check(mesh, ops, sizes, seconds)
    axes: dict[Axis, AxisCost] = {
        axis: _measure_axis(mesh, axis, ops, sizes, seconds) for axis in AXES if mesh.size(axis) > 1
    }
    found = [LinkCost(axes, _origin(mesh))]
    dist.broadcast_object_list(found, src=0, group=host_group())
    return found[0]


@final
class _Probe:
    """One operation with one size on one axis, and the samples of it."""

    def __init__(self, mesh: ParallelMesh, axis: Axis, op: LinkOp, num_bytes: int) -> None:
        self.mesh, self.size = mesh, mesh.size(axis)
        self.length = math.ceil(num_bytes / (4 * self.size)) * self.size  # a multiple of the number of ranks
        self.call = _calls(mesh, axis, self.length)[op]
        self.samples: list[float] = []

    def warm_up(self, seconds: float) -> int:
        """Return how many samples to take in a pass: the same on all ranks."""
        first = [self._round() for _ in range(_WARM_UP)]
        # By the slowest rank: with different numbers of samples, the ranks' collectives would no longer match.
        slowest = _slowest(first[-1])
        return min(_MOST, max(_LEAST, round(seconds / (_PASSES * slowest * self.size))))

    def sample(self, count: int) -> None:
        self.samples += [self._round() for _ in range(count)]

    def result(self) -> tuple[int, float]:
        """Return the bytes, and the seconds of one call on the slowest rank."""
        return 4 * self.length, _slowest(typical(self.samples))

    def _round(self) -> float:
        # Calls only queue work on an accelerator: what is left of earlier rounds must not count.
        self.mesh.accelerator.synchronize()
        started = time.perf_counter()
        for root in range(self.size):
            self.call(root)
        self.mesh.accelerator.synchronize()
        return (time.perf_counter() - started) / self.size


def _measure_axis(
    mesh: ParallelMesh, axis: Axis, ops: Sequence[LinkOp], sizes: Sequence[int], seconds: float
) -> AxisCost:
    probes: dict[LinkOp, list[_Probe]] = {op: [_Probe(mesh, axis, op, num_bytes) for num_bytes in sizes] for op in ops}
    counts = [(probe, probe.warm_up(seconds)) for same_op in probes.values() for probe in same_op]
    for _ in range(_PASSES):
        for probe, count in counts:
            probe.sample(count)
    timings: dict[LinkOp, Timings] = {op: [probe.result() for probe in same_op] for op, same_op in probes.items()}
    return fit_axis(mesh.size(axis), timings)


def _calls(mesh: ParallelMesh, axis: Axis, length: int) -> Mapping[LinkOp, Callable[[int], object]]:
    """Each operation on float32 tensors, of which the full one has `length` elements, see [Note: what is timed]."""
    group, ranks, here = mesh.group(axis), mesh.ranks(axis), mesh.rank(axis)
    device = mesh.accelerator.get_current_device()
    full, other = torch.zeros(length, device=device), torch.zeros(length, device=device)
    shard = torch.zeros(length // len(ranks), device=device)
    after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]

    def shift(_root: int) -> None:
        sent = dist.P2POp(dist.isend, full, after, group)
        received = dist.P2POp(dist.irecv, other, before, group)
        # Together: every rank sends to the next, and separate sends could all wait for their receives.
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return {
        "all_reduce": lambda _: dist.all_reduce(full, group=group),
        "all_gather": lambda _: _all_gather_single(full, shard, group=group),
        "reduce_scatter": lambda _: _reduce_scatter_single(shard, full, group=group),
        "all_to_all": lambda _: dist.all_to_all_single(other, full, group=group),
        "broadcast": lambda root: dist.broadcast(full, ranks[root], group=group),
        "p2p": shift,
    }


def _slowest(seconds: float) -> float:
    """The largest of the ranks' values, the same on all ranks."""
    number = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    dist.all_reduce(number, dist.ReduceOp.MAX, host_group())
    return float(number.item())


def _origin(mesh: ParallelMesh) -> LinkOrigin:
    names: list[str] = [""] * mesh.world_size
    dist.all_gather_object(names, socket.gethostname(), host_group())
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    hosts = tuple(sorted(set(names)))
    return LinkOrigin(hosts, dist.get_backend(), mesh.accelerator.name, mesh.world_size, torch.__version__, now)


def _check(mesh: ParallelMesh, ops: Sequence[LinkOp], sizes: Sequence[int], seconds: float) -> None:
    if dist.get_backend() == "fake":
        raise UnsupportedError(
            "Links are measured between real processes. Found the backend 'fake', which sends nothing. "
            "Start the ranks with torchrun, or assume costs: LinkCost({axis: AxisCost(...)})."
        )
    if mesh.world_size == 1:
        raise UnsupportedError(
            "A link has two ends. Found a world of 1 process. Start at least 2: colossal benchmark --collectives --dp 2"
        )
    unknown = [op for op in ops if op not in LINK_OPS]
    if unknown or not ops:
        raise ConfigError(
            f"An operation is one of {', '.join(LINK_OPS)}. Found {unknown or 'none'}. Pass some of these."
        )
    if len(set(sizes)) < 2 or min(sizes) < 1 or not seconds > 0:  # noqa: PLR2004 (a line needs two points)
        raise ConfigError(
            "Two different sizes or more, each of at least 1 byte, and a time greater than 0 are needed to separate "
            f"alpha from beta. Found sizes={list(sizes)} and seconds={seconds}. Pass more sizes, or leave them out."
        )
