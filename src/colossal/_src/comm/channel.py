# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""One axis of a mesh, as the collectives see it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis, ParallelMesh, current_mesh, group_for
from colossal._src.comm.counter import CommCounter, Op, active_counters
from colossal._src.comm.lost_peers import LostPeerGuard
from colossal._src.comm.pairwise import all_gather_pairwise, reduce_scatter_pairwise
from colossal.errors import ShapeError

_Collective = Callable[..., dist.Work | None]

# torch 2.13 renamed these two; 2.11 has only the old names.
_IS_RENAMED = hasattr(dist, "all_gather_single")
_all_gather_single: _Collective = getattr(dist, "all_gather_single" if _IS_RENAMED else "all_gather_into_tensor")
_reduce_scatter_single: _Collective = getattr(dist, "reduce_scatter_single" if _IS_RENAMED else "reduce_scatter_tensor")

_FRACTION_SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1, "reduce": 1}

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

_IN_PLACE = ("nccl", "shm", "fake")
"""Backends whose reduce-scatter may write its result over this rank's slice of the input."""

_PACK_BYTES = 2**24


@final
@dataclass(frozen=True)
class Channel:
    """Collectives among the ranks of one axis, without gradients; `colossal.comm`'s functions add those.

    A channel remembers the counters that were open when it was made, so that a backward pass, which may run in another
    thread, is counted with its forward pass. With one rank on the axis every method returns its argument.

    Args:
        axis: The axis of the mesh.
        mesh: The mesh; the ambient one by default.
        counters: What counts the calls; by default the counters that are open now.

    Raises:
        MeshError: There is no such axis, or no process group yet.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.comm import Channel
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=1), ParallelMesh(tp=4):
        ...     print(Channel("tp").split(torch.arange(8), dim=0))
        tensor([2, 3])
    """

    axis: Axis
    mesh: ParallelMesh = field(default_factory=current_mesh)
    counters: tuple[CommCounter, ...] = field(default_factory=active_counters)

    def __post_init__(self) -> None:
        self.mesh.size(self.axis)

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.mesh.size(self.axis)

    @property
    def rank(self) -> int:
        """Index of this rank on the axis."""
        return self.mesh.rank(self.axis)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis."""
        return self.mesh.group(self.axis)

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """Combine over the axis.

        Args:
            tensor: Any shape, the same on all ranks.
            op: Add the tensors up, or take the largest of each element.

        Returns:
            The total, in a new tensor of the same shape.

        Communication: all_reduce, the axis, the tensor's bytes.
        """
        if self.size == 1:
            return tensor
        # The collective writes in place, and autograd may have saved the argument.
        total = tensor.clone(memory_format=torch.contiguous_format)
        with LostPeerGuard():
            dist.all_reduce(total, _REDUCE_OPS[op], self._group_for(total))
        self._count("all_reduce", total)
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Join the ranks' tensors along a dimension, in rank order.

        Args:
            tensor: Any shape, the same on all ranks.
            dim: The dimension that grows by the size of the axis.

        Returns:
            A tensor whose dimension `dim` is as many times as long as there are ranks.

        Raises:
            ShapeError: The tensor has no such dimension.

        Communication: all_gather, the axis, the result's bytes.
        """
        dim = _check_dim(tensor, dim)
        if self.size == 1:
            return tensor
        # Backends join along the first dimension only; other dimensions are put in order by a copy.
        full = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        with LostPeerGuard():
            for work in all_gather_into(full, tensor.contiguous(), self._group_for(tensor)):
                work.wait()
        self._count("all_gather", full)
        return full if dim == 0 else torch.cat(full.chunk(self.size), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum over the axis and keep this rank's shard of the sum.

        Args:
            tensor: Any shape, the same on all ranks.
            dim: The dimension that is sharded over the ranks.

        Returns:
            This rank's shard of the sum along `dim`.

        Raises:
            ShapeError: The tensor has no such dimension, or its length does not divide by the size of the axis.

        Communication: reduce_scatter, the axis, the tensor's bytes.
        """
        dim = self._check_divides(tensor, dim)
        if self.size == 1:
            return tensor
        parts = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(self.size, dim))
        part = parts.new_empty(parts.shape[0] // self.size, *parts.shape[1:])
        with LostPeerGuard():
            works, finish = reduce_scatter_into(part, parts, self._group_for(part))
            for work in works:
                work.wait()
        # On gloo the terms are only added up once they have arrived.
        finish()
        self._count("reduce_scatter", parts)
        return part

    def all_to_all(self, tensor: torch.Tensor, split_dim: int, join_dim: int) -> torch.Tensor:
        """Send the i-th part along one dimension to rank i, and join what comes in along another.

        Args:
            tensor: Any shape, the same on all ranks.
            split_dim: The dimension that is sharded over the ranks.
            join_dim: The dimension that grows by the size of the axis.

        Returns:
            A tensor with `split_dim` shorter and `join_dim` longer by the size of the axis.

        Raises:
            ShapeError: The tensor has no such dimension, or `split_dim` does not divide by the size of the axis.

        Communication: all_to_all, the axis, the tensor's bytes.
        """
        split_dim, join_dim = self._check_divides(tensor, split_dim), _check_dim(tensor, join_dim)
        if self.size == 1:
            return tensor
        outgoing = torch.stack(tensor.chunk(self.size, split_dim))
        incoming = torch.empty_like(outgoing)
        with LostPeerGuard():
            dist.all_to_all_single(incoming, outgoing, group=self._group_for(outgoing))
        self._count("all_to_all", outgoing)
        return torch.cat(incoming.unbind(), join_dim)

    def exchange_rows(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send each rank the rows that are for it, as many as there are, and join what comes in.

        Args:
            rows: Of shape (sum of `send`, ...): those for the first rank, those for the second, and so on.
            send: How many rows go to each rank, this one included.
            receive: How many come from each rank: what that one's `send` says of this rank.

        Returns:
            The rows that came in, in the order of the ranks that sent them.

        Communication: all_to_all, the axis, the bytes of the rows that leave this rank.
        """
        if self.size == 1:
            return rows
        incoming = rows.new_empty(sum(receive), *rows.shape[1:])
        with LostPeerGuard():
            dist.all_to_all_single(incoming, rows.contiguous(), [*receive], [*send], group=self._group_for(rows))
        count_rows(self, rows, send)
        return incoming

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all ranks the values of the axis' first rank, in place; small tensors travel together.

        Args:
            tensors: As many as on every other rank, in the same order, of the same shapes and dtypes.

        Communication: broadcast, the axis, the tensors' bytes; once for about every 16 MB of one dtype.
        """
        if self.size == 1:
            return
        for pack in group_into_buckets(tensors, _PACK_BYTES):
            # Autograd refuses to write to a parameter in place.
            parts = [tensor.detach() for tensor in pack]
            device = self.mesh.accelerator.get_current_device()
            # a tensor that is sent alone needs no copy
            is_alone = len(parts) == 1 and parts[0].is_contiguous() and parts[0].device == device
            joined = parts[0].view(-1) if is_alone else torch.cat([part.reshape(-1) for part in parts]).to(device)
            sent = joined.view(torch.uint8)  # NCCL lacks dtypes
            with LostPeerGuard():
                dist.broadcast(sent, src=self.mesh.ranks(self.axis)[0], group=self._group_for(sent))
            self._count("broadcast", joined)
            if is_alone:
                continue
            for part, values in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
                part.copy_(values.view(part.shape))

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work | None:
        """Begin to give all ranks the tensor of one of them, in place.

        Args:
            tensor: Contiguous, of the same shape on all ranks; not to be touched before the work is over.
            source: The index on the axis of the rank that has it.

        Returns:
            What to wait for; None if there is nothing to do.

        Communication: broadcast, the axis, the tensor's bytes.
        """
        if self.size == 1 or not tensor.numel():
            return None
        self._count("broadcast", tensor)
        return dist.broadcast(tensor, self.mesh.ranks(self.axis)[source], self._group_for(tensor), async_op=True)

    def start_reduce(self, tensor: torch.Tensor, target: int) -> dist.Work | None:
        """Begin to sum over the axis, for one rank, in place; the others' tensors are used up.

        Args:
            tensor: Contiguous, of the same shape on all ranks; not to be touched before the work is over.
            target: The index on the axis of the rank that gets the sum.

        Returns:
            What to wait for; None if there is nothing to do.

        Communication: reduce, the axis, the tensor's bytes.
        """
        if self.size == 1 or not tensor.numel():
            return None
        self._count("reduce", tensor)
        return dist.reduce(tensor, self.mesh.ranks(self.axis)[target], group=self._group_for(tensor), async_op=True)

    def split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Keep this rank's shard along a dimension.

        Args:
            tensor: Any shape, the same on all ranks.
            dim: The dimension that is sharded over the ranks.

        Returns:
            A contiguous shard of the tensor.

        Raises:
            ShapeError: The tensor has no such dimension, or its length does not divide by the size of the axis.
        """
        dim = self._check_divides(tensor, dim)
        if self.size == 1:
            return tensor
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    def lengths(self, length: int) -> list[int]:
        """Collect the lengths of the ranks' shards of a dimension.

        Args:
            length: The length of this rank's shard.

        Returns:
            The lengths, in rank order. A fake group sends nothing: there, all lengths are assumed to be equal.

        Communication: all_gather, the axis, 8 bytes for each rank.
        """
        if self.size == 1 or dist.get_backend(self.group) == "fake":
            return [length] * self.size
        # In host memory, as reading the lengths from an accelerator would make the host wait for it.
        own = torch.tensor([length], device="cpu")
        return self.all_gather(own, 0).tolist()

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return group_for(tensor, self.group)

    def _check_divides(self, tensor: torch.Tensor, dim: int) -> int:
        dim = _check_dim(tensor, dim)
        if tensor.shape[dim] % self.size:
            raise ShapeError(
                f"A dimension that is sharded over the {self.size} ranks of axis {self.axis!r} must be a multiple of "
                f"{self.size}. Found dimension {dim} of shape {tuple(tensor.shape)}. Pad it to "
                f"{-(-tensor.shape[dim] // self.size) * self.size}."
            )
        return dim

    def _count(self, op: Op, full: torch.Tensor) -> None:
        num_bytes = _FRACTION_SENT[op] * full.numel() * full.element_size() * (self.size - 1) // self.size
        for counter in self.counters:
            counter.add(op, self.axis, num_bytes)


def count_rows(channel: Channel, rows: torch.Tensor, send: Sequence[int]) -> None:
    """Count the bytes of the rows that leave this rank."""
    num_bytes = (len(rows) - send[channel.rank]) * math.prod(rows.shape[1:]) * rows.element_size()
    for counter in channel.counters:
        counter.add("all_to_all", channel.axis, num_bytes)


def chunk_bounds(length: int, size: int, index: int) -> tuple[int, int]:
    """Return the first index and the length of a chunk of a dimension that `torch.chunk` splits into `size` chunks."""
    part = -(-length // size)
    begin = min(index * part, length)
    return begin, min(part, length - begin)


def pad_dim(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Pad a dimension with zeros at its end."""
    shape = list(tensor.shape)
    shape[dim] = length - tensor.shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim) if shape[dim] else tensor


def all_gather_into(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to gather the ranks' shards, in rank order; `shard` may be this rank's slice of `full`."""
    if dist.get_backend(group) != "gloo":
        return _some(_all_gather_single(full, shard, group=group, async_op=True))
    own_slice = full.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    # The pairwise exchange sends from the slice of the full tensor.
    if own_slice.data_ptr() != shard.data_ptr():
        own_slice.copy_(shard.view(own_slice.shape))
    return all_gather_pairwise(full, group)


def reduce_scatter_into(
    part: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor | None = None
) -> tuple[list[dist.Work], Callable[[], object]]:
    """Begin to sum the ranks' tensors, each rank one shard; return the works to wait for, and a call that finishes.

    `part` may be this rank's slice of `parts`. `scratch` is a buffer for the other ranks' shards, which gloo needs.
    """
    backend = dist.get_backend(group)
    if backend == "gloo":
        return reduce_scatter_pairwise(part, parts, group, scratch)
    is_inside = part.untyped_storage().data_ptr() == parts.untyped_storage().data_ptr()
    out = torch.empty_like(part) if is_inside and backend not in _IN_PLACE else part
    work = _reduce_scatter_single(out, parts, group=group, async_op=True)
    return _some(work), (lambda: None) if out is part else lambda: part.copy_(out)


def needs_scratch(group: dist.ProcessGroup) -> bool:
    """Return whether `reduce_scatter_into` uses a buffer for the shards of other ranks."""
    return dist.get_backend(group) == "gloo"


def _some(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def group_into_buckets(tensors: Iterable[torch.Tensor], num_bytes: float) -> Iterator[list[torch.Tensor]]:
    """Collect tensors of one dtype and device until a message of them has at least so many bytes."""
    open_packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        # All ranks make the same packs: these depend on the order, the sizes and the dtypes alone.
        pack = open_packs.setdefault((tensor.dtype, tensor.device), [])
        pack.append(tensor)
        if sum(each.nbytes for each in pack) >= num_bytes:
            yield open_packs.pop((tensor.dtype, tensor.device))
    yield from open_packs.values()


def _check_dim(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(
            f"The dimension is one of the tensor's {tensor.dim()}. Found dim={dim} for shape {tuple(tensor.shape)}. "
            "Count from 0, or from -1 backwards."
        )
    return dim % tensor.dim()
