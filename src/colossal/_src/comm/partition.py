# pyright: reportUnknownMemberType=false
"""Buffers that are partitioned over ranks, with asynchronous reduce-scatter and all-gather."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, final

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis
from colossal._src.comm.channel import all_gather_into, needs_scratch, reduce_scatter_into
from colossal._src.comm.counter import CommCounter, Op, active_counters
from colossal._src.comm.fp8 import all_reduce_fp8, fp8_nbytes, reduce_scatter_fp8
from colossal._src.comm.group_reduce import all_reduce_over
from colossal._src.comm.lost_peers import LostPeerGuard


@final
class PendingComm:
    """Communication that is under way."""

    def __init__(self, works: Sequence[dist.Work] = (), then: Callable[[], object] | None = None) -> None:
        self._works, self._then = works, then

    def wait(self) -> None:
        """Wait until the result is there; a second call does nothing."""
        # Cleared first, so that a second call does not add up again, and nothing keeps the buffers alive.
        works, then = self._works, self._then
        self._works, self._then = (), None
        with LostPeerGuard():
            for work in works:
                work.wait()
        if then is not None:
            then()


@final
@dataclass(frozen=True)
class Partition:
    """Ranks of which each owns one segment of every buffer, and ranks that own the same one elsewhere.

    All buffers have as many elements as a multiple of the number of segments.
    """

    group: dist.ProcessGroup  # the ranks over which a buffer is partitioned, in the order of the segments
    # the ranks that own the same segment in other such groups; None if there is one group only
    replicas: dist.ProcessGroup | None = None
    axis: Axis = "dp"  # the axis of the mesh that all of them are on, under which calls are counted
    # by how many mean losses a sum of gradients is divided; by default the number of ranks over which it is taken
    num_means: int | None = None
    # what counts the calls; by default the counters that are open now
    counters: tuple[CommCounter, ...] = field(default_factory=active_counters)
    compress_fp8: bool = False  # let the terms of sums travel in 8 bits, with scales

    # Groups do not change, and torch looks each one up: these are asked for each gradient.
    @cached_property
    def size(self) -> int:
        """Number of segments."""
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """The segment that this rank owns."""
        return dist.get_rank(self.group)

    @cached_property
    def num_replicas(self) -> int:
        """Number of ranks that own each segment."""
        return 1 if self.replicas is None else dist.get_world_size(self.replicas)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks over which sums are taken."""
        return self.size * self.num_replicas

    @cached_property
    def gradient_scale(self) -> float:
        """What a gradient of each rank is multiplied by, so that their sum is the gradient of the mean loss."""
        return 1.0 / (self.num_means or self.world_size)

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """The global rank and the segment of every rank that takes part, in the order of the global ranks."""
        if self.replicas is None:
            return tuple((rank, index) for index, rank in enumerate(dist.get_process_group_ranks(self.group)))
        own = dist.get_process_group_ranks(self.group)
        first = dist.get_process_group_ranks(self.replicas)
        found = [(rank - own[self.rank] + other, at) for at, rank in enumerate(own) for other in first]
        return tuple(sorted(found))

    def segment(self, buffer: torch.Tensor) -> torch.Tensor:
        """Find the part of a buffer that this rank owns."""
        length = buffer.numel() // self.size
        return buffer[self.rank * length : (self.rank + 1) * length]

    def scratch_numel(self, buffer: torch.Tensor) -> int:
        """Return the size of the scratch buffer that a reduce-scatter of a buffer takes."""
        if self.compress_fp8 and self.size > 1:
            return -(-2 * self.size * fp8_nbytes(buffer.numel() // self.size) // buffer.itemsize)
        return buffer.numel() // self.size * (self.size - 1) if needs_scratch(self.group) else 0

    def start_reduce_scatter(
        self, buffer: torch.Tensor, own: torch.Tensor, scratch: torch.Tensor | None = None
    ) -> PendingComm:
        """Begin to sum a buffer up over all ranks, each segment for its owners.

        Communication: reduce_scatter, dp, the buffer's bytes, or one for each of its elements; with replicas also
        all_reduce, of the segment.
        """
        if self.size == 1:
            if own.data_ptr() != buffer.data_ptr():
                own.copy_(buffer)
            return PendingComm(then=lambda: self._sum_replicas(own))
        if self.compress_fp8:
            works, finish, num_bytes = reduce_scatter_fp8(own, buffer, self.group, scratch)
        else:
            works, finish = reduce_scatter_into(own, buffer, self.group, scratch)
            num_bytes = buffer.nbytes
        self._count("reduce_scatter", num_bytes, self.size)

        def then() -> None:
            finish()
            self._sum_replicas(own)

        return PendingComm(works, then)

    def start_all_gather(self, buffer: torch.Tensor) -> PendingComm:
        """Begin to give all ranks of the group every segment of a buffer, from its owner.

        Communication: all_gather, dp, the buffer's bytes.
        """
        if self.size == 1:
            return PendingComm()
        self._count("all_gather", buffer.nbytes, self.size)
        return PendingComm(all_gather_into(buffer, self.segment(buffer), self.group))

    def total(self, values: torch.Tensor, op: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """Combine small values over all ranks.

        Communication: all_reduce, dp, the values' bytes.
        """
        groups = [group for group in (self.group, self.replicas) if group is not None]
        return all_reduce_over(values, groups, op, self.axis)

    def _sum_replicas(self, own: torch.Tensor) -> None:
        # After the reduce-scatter, so that only one segment of a buffer is sent between the groups.
        if self.replicas is not None and self.num_replicas > 1:
            if self.compress_fp8:
                own.copy_(all_reduce_fp8(own, self.replicas))
            else:
                dist.all_reduce(own, group=self.replicas)
            num_bytes = fp8_nbytes(own.numel()) if self.compress_fp8 else own.nbytes
            self._count("all_reduce", 2 * num_bytes, self.num_replicas)

    def _count(self, op: Op, num_bytes: int, size: int) -> None:
        # A set: the counters of the partition may be open now as well, and count a call once.
        for counter in {*self.counters, *active_counters()}:
            counter.add(op, self.axis, num_bytes * (size - 1) // size)
