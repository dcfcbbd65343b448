# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Convert a tensor from one layout to another, by collectives along the axes of a mesh."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.comm import Channel, chunk_bounds
from colossal._src.tensor.layout import Layout
from colossal.errors import MeshError, ShapeError

if TYPE_CHECKING:
    from colossal._src.tensor.relayout_step import RelayoutStep


def relayout(tensor: torch.Tensor, source: Layout, target: Layout, mesh: ParallelMesh | None = None) -> torch.Tensor:
    """Convert this rank's local shard of a tensor to another layout, by the cheapest path.

    All ranks of the layouts call it together. It is differentiable: the gradient comes back in the layout of the
    source. A gradient is the same on all ranks that hold the same part, and each summand has the gradient of the sum.

    Args:
        tensor: What this rank holds, of `source.local_shape`.
        source: The present layout, with the names of its axes.
        target: The new layout.
        mesh: The mesh; the ambient one by default.

    Returns:
        What this rank holds then, of `target.local_shape`; `tensor` itself if the layouts are equal.

    Raises:
        PlanError: See `plan_relayout`; or this rank holds no shard of the tensor.
        MeshError: The layouts name no axes, or axes of other sizes than the mesh has.
        ShapeError: The tensor has not the local shape of the source.

    Communication: what ``print(plan_relayout(source, target, tensor.itemsize, mesh.link_cost))`` shows; backward, what
    leads back.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.tensor import Layout, relayout
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2) as mesh:
        ...         rows, columns = (Layout.parse(text, (2, 2), mesh=mesh, axes=["tp"]) for text in ("S0R", "RS0"))
        ...         row = 2 * mesh.rank("tp") + torch.arange(2)[None]  # rank 0 holds [[0, 1]], rank 1 [[2, 3]]
        ...         return relayout(row, rows, columns).tolist()
        >>> run_threads(program, 2)
        [[[0], [2]], [[1], [3]]]
    """
    mesh = mesh or current_mesh()
    _check_mesh(source, mesh)
    expected = source.local_shape(mesh.global_rank)
    if tuple(tensor.shape) != expected:
        raise ShapeError(
            f"A tensor of shape {source.shape} with the layout {source} has the shape {expected} on rank "
            f"{mesh.global_rank}. Found {tuple(tensor.shape)}. Pass this rank's local shard, or the layout that it has."
        )
    if source == target:
        return tensor
    from colossal._src.tensor.relayout_path import plan_relayout

    plan_relayout(source, target, tensor.itemsize, mesh.link_cost)  # which checks both, before anything is sent
    walk = _Conversion(source, target, mesh, tuple(Channel(axis, mesh) for axis in source.axes))
    result = _Convert.apply(tensor, walk)
    assert isinstance(result, torch.Tensor)
    return result


class _Conversion:
    """A conversion that was asked for, and what leads back."""

    def __init__(self, source: Layout, target: Layout, mesh: ParallelMesh, channels: tuple[Channel, ...]) -> None:
        self._source, self._target, self._mesh, self._channels = source, target, mesh, channels

    def back(self) -> "_Conversion":
        """The same with gradients: a summand's is that of the sum, so there are no partial sums."""
        source, target = (replace(layout, partial=()) for layout in (self._target, self._source))
        return _Conversion(source, target, self._mesh, self._channels)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        from colossal._src.tensor.relayout_path import plan_relayout

        path = plan_relayout(self._source, self._target, tensor.itemsize, self._mesh.link_cost)
        place = self._source.coordinate_of(self._mesh.global_rank)
        for i, step in enumerate(path.steps):
            move = _StepRunner(step, path.layouts[i], path.layouts[i + 1], place, self._channels[step.axis])
            tensor = move(tensor)
        return tensor


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, walk: _Conversion) -> torch.Tensor:
        ctx.walk = walk
        result = walk(tensor)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Convert.apply(grads[0], ctx.walk.back()), None


class _StepRunner:
    """One step, on tensors that need not divide evenly, and whose dimensions may be packed.

    [Note: padding]
    A collective takes tensors of one size. So the block of each group is padded to the longest of all ranks, and the
    padding is removed after the collective: every rank knows how long all blocks are.
    """

    def __init__(
        self, step: "RelayoutStep", before: Layout, after: Layout, place: Sequence[int], channel: Channel
    ) -> None:
        self._step, self._size, self._index = step, before.grid[step.axis], place[step.axis]
        self._channel = channel
        dim, to = step.source_dim, step.target_dim
        self._has = [length for _, length in before.extents(dim, place)] if dim is not None else []
        self._joined = _lengths(before, after, dim, place) if dim is not None else []
        self._unsharded = _lengths(after, before, to, place) if to is not None else []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        step = self._step
        if step.op == "shard":
            return self._keep(tensor)
        if step.op == "all_reduce":
            return self._channel.all_reduce(tensor)
        if step.op == "reduce_scatter":
            assert step.target_dim is not None
            return self._trim(self._channel.reduce_scatter(self._spread(tensor), step.target_dim))
        assert step.source_dim is not None
        tensor = _pad(tensor, step.source_dim, self._has, [-(-length // self._size) for length in self._joined])
        if step.op == "all_gather":
            return self._join(self._channel.all_gather(tensor, step.source_dim))
        assert step.target_dim is not None
        moved = self._channel.all_to_all(self._spread(tensor), step.target_dim, step.source_dim)
        return self._join(self._trim(moved))

    def _join(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put the blocks of each group together that came from different ranks, without their padding."""
        dim = self._step.source_dim
        assert dim is not None
        if len(self._joined) == 1:
            return tensor.narrow(dim, 0, self._joined[0])
        padded = [-(-length // self._size) for length in self._joined]
        parts = [part.split(padded, dim) for part in tensor.chunk(self._size, dim)]
        blocks = [torch.cat([part[i] for part in parts], dim) for i in range(len(padded))]
        return torch.cat(
            [block.narrow(dim, 0, length) for block, length in zip(blocks, self._joined, strict=True)], dim
        )

    def _spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Order along the target dimension what goes to each rank, padded to one size."""
        dim, size = self._step.target_dim, self._size
        assert dim is not None
        padded = [-(-length // size) * size for length in self._unsharded]
        tensor = _pad(tensor, dim, self._unsharded, padded)
        if len(padded) == 1:
            return tensor
        groups = [group.chunk(size, dim) for group in tensor.split(padded, dim)]
        return torch.cat([group[rank] for rank in range(size) for group in groups], dim)

    def _trim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remove the padding of what this rank received along the target dimension."""
        dim = self._step.target_dim
        assert dim is not None
        lengths = [chunk_bounds(length, self._size, self._index)[1] for length in self._unsharded]
        blocks = tensor.split([-(-length // self._size) for length in self._unsharded], dim)
        kept = [block.narrow(dim, 0, length) for block, length in zip(blocks, lengths, strict=True)]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        dim = self._step.target_dim
        assert dim is not None
        blocks = tensor.split(self._unsharded, dim)
        kept = [block.narrow(dim, *chunk_bounds(block.shape[dim], self._size, self._index)) for block in blocks]
        return (kept[0] if len(kept) == 1 else torch.cat(kept, dim)).contiguous()


def _lengths(inner: Layout, outer: Layout, dim: int, place: Sequence[int]) -> list[int]:
    """Lengths of the blocks of a dimension that `inner` shards once more than `outer`, before it does."""
    axes = outer.dims[dim]
    if axes:
        return [length for _, length in outer.extents(dim, place)]
    return list(inner.groups[dim])


def _pad(tensor: torch.Tensor, dim: int, lengths: list[int], padded: list[int]) -> torch.Tensor:
    """Pad the blocks of a dimension with zeros."""
    if lengths == padded:
        return tensor
    tail = [0, 0] * (tensor.dim() - dim - 1)
    blocks = zip(tensor.split(lengths, dim), lengths, padded, strict=True)
    return torch.cat([pad(block, [*tail, 0, long - short]) for block, short, long in blocks], dim)


def _check_mesh(layout: Layout, mesh: ParallelMesh) -> None:
    sizes = tuple(mesh.size(axis) for axis in layout.axes)
    if not layout.axes or sizes != layout.grid or mesh.ranks(*layout.axes) != layout.ranks:
        raise MeshError(
            "A conversion sends along axes of the mesh, which the layout names. Found the axes "
            f"{layout.axes} of a grid {layout.grid} on ranks {layout.ranks}, and {mesh}. "
            "Make the layout with Layout.parse(..., mesh=mesh, axes=[...])."
        )
