"""The only bridge between torch's DTensor and layouts."""

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from colossal.comm import all_reduce_over
from colossal.errors import UnsupportedError
from colossal.tensor.boxes import BoxLayout
from colossal.tensor.flat import FlatLayout, boxes_of, flat_shard_of, mark_like, whole_shape
from colossal.tensor.layout import Layout
from colossal.tensor.part import TensorPart, tensor_part_of
from colossal.tensor.region import Region


def layout_of(tensor: torch.Tensor, ranks: Sequence[int] = (0,)) -> Layout | FlatLayout | BoxLayout:
    """Tell how a tensor lies.

    Args:
        tensor: A DTensor, what `mark_shard` or `mark_part` knows, or any other tensor: that is whole on each of
            `ranks`.
        ranks: The global ranks that hold a tensor which is neither.

    Returns:
        The layout of the whole tensor.

    Raises:
        UnsupportedError: A DTensor is cut in another order than that of its mesh (strided), or holds partial results
            that are no sums.

    Example:
        >>> import torch
        >>> from colossal.tensor import layout_of
        >>> [region.shape for region in layout_of(torch.zeros(4, 2)).regions_of(0)]
        [(4, 2)]
    """
    shard, part = flat_shard_of(tensor), tensor_part_of(tensor)
    if part is not None:
        return part.layout if shard is None else _flat_part(part, shard.layout)
    if shard is not None:
        return shard.layout
    if not _is_dtensor(tensor):
        return _shared(tuple(tensor.shape), tuple(ranks))
    sharded: Any = tensor
    ranks, grid = _grid_of(sharded.device_mesh)
    cuts = [_cut(placement) for placement in sharded.placements]
    dims = tuple(tuple(axis for axis, cut in enumerate(cuts) if cut == dim) for dim in range(tensor.dim()))
    partial = tuple(axis for axis, placement in enumerate(sharded.placements) if _is_sum(placement))
    return _shared(tuple(tensor.shape), ranks, grid, dims, partial)


def placements_of(layout: Layout) -> tuple[Any, ...]:
    """Write a layout as torch's DTensor does.

    Args:
        layout: The layout.

    Returns:
        A placement for each axis of its grid: `Shard`, `Replicate` or `Partial`.

    Raises:
        UnsupportedError: Axes shard one dimension in another order than that of the grid, or pieces are packed into it:
            DTensor has no word for that.

    Example:
        >>> from colossal.tensor import Layout, placements_of
        >>> placements_of(Layout.parse("RS0P1", (4, 4), grid=(2, 2)))
        (Shard(dim=1), Partial(sum))
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    is_packed = any(axes and len(groups) > 1 for axes, groups in zip(layout.dims, layout.groups, strict=True))
    if is_packed or any(list(axes) != sorted(axes) for axes in layout.dims):
        raise UnsupportedError(
            "DTensor shards a dimension along the axes in the order of its mesh, and as one piece. Found "
            f"{layout} with the groups {layout.groups}. Convert the tensor to such a layout first."
        )
    cuts = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    return tuple(
        Shard(cuts[axis]) if axis in cuts else Partial() if axis in layout.partial else Replicate()
        for axis in range(len(layout.grid))
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Take the part that this rank holds.

    Args:
        tensor: A DTensor, or any other tensor.

    Returns:
        The local part, sharing memory with `tensor`; `tensor` itself if it is whole.

    Example:
        >>> import torch
        >>> from colossal.tensor import local_of
        >>> tensor = torch.ones(3)
        >>> local_of(tensor) is tensor
        True
    """
    if not _is_dtensor(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():  # which spares an operation of autograd
        return sharded.to_local()


def parts_of(tensor: torch.Tensor, rank: int = 0) -> list[tuple[Region, torch.Tensor]]:
    """Look at what this rank holds of a tensor as boxes of the whole one.

    Args:
        tensor: A DTensor, what `mark_shard` or `mark_part` knows, or any other tensor.
        rank: The global rank of this process.

    Returns:
        Each box with its elements, which share memory with `tensor`.

    Example:
        >>> import torch
        >>> from colossal.tensor import parts_of
        >>> [(region.shape, part.shape) for region, part in parts_of(torch.zeros(2, 3))]
        [((2, 3), torch.Size([2, 3]))]
    """
    if (part := tensor_part_of(tensor)) is not None:
        return part.views(boxes_of(tensor))
    if flat_shard_of(tensor) is not None:
        return boxes_of(tensor)
    (region,) = layout_of(tensor, (rank,)).regions_of(rank)
    return [(region, local_of(tensor))]


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Put a tensor together from the parts of all ranks.

    Args:
        tensor: A DTensor, what `mark_shard` or `mark_part` knows, or any other tensor.

    Returns:
        The whole tensor, without gradient; `tensor` itself if it is whole.

    Communication: all_gather, the axes that cut the tensor, its bytes; all_reduce for ranges and parts; all of its
    ranks must call.

    Example:
        >>> import torch
        >>> from colossal.tensor import whole_of
        >>> whole_of(torch.ones(3)).shape
        torch.Size([3])
    """
    marks = [mark for mark in (flat_shard_of(tensor), tensor_part_of(tensor)) if mark is not None]
    if marks:
        whole = torch.zeros(whole_shape(tensor), dtype=tensor.dtype, device=tensor.device)
        for region, box in parts_of(mark_like(tensor.detach(), tensor)):
            whole[region.slices] = box
        return all_reduce_over(whole, [group for mark in marks for group in mark.groups])
    if not _is_dtensor(tensor):
        return tensor
    sharded: Any = tensor.detach()
    return sharded.full_tensor()


def shard_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Find the groups of ranks that hold different parts of a tensor.

    A sum over the elements of the whole tensor is the local sum, added up over each of these groups.

    Args:
        tensor: A DTensor, what `mark_shard` or `mark_part` knows, or any other tensor. A gradient is not marked: ask
            its parameter.

    Returns:
        One group for each axis that cuts the tensor; none for a whole tensor.

    Example:
        >>> import torch
        >>> from colossal.tensor import shard_groups
        >>> shard_groups(torch.ones(3))
        ()
    """
    marks = [mark for mark in (flat_shard_of(tensor), tensor_part_of(tensor)) if mark is not None]
    groups = tuple(group for mark in marks for group in mark.groups)
    if not _is_dtensor(tensor):
        return groups
    sharded: Any = tensor
    return groups + tuple(
        sharded.device_mesh.get_group(axis)
        for axis, placement in enumerate(sharded.placements)
        if _cut(placement) is not None
    )


def meeting_device(tensor: torch.Tensor) -> torch.device:
    """Tell where the groups of ranks that share a tensor communicate.

    Args:
        tensor: A DTensor, a range that `mark_shard` knows, or any other tensor.

    Returns:
        The device of the tensor; that of its groups if it is offloaded to another.

    Example:
        >>> import torch
        >>> from colossal.tensor import meeting_device
        >>> meeting_device(torch.ones(3))
        device(type='cpu')
    """
    holder: Any = flat_shard_of(tensor) or getattr(tensor, "device_mesh", None)
    if holder is None or holder.device_type == tensor.device.type:
        return tensor.device
    return torch.device(holder.device_type)


def _flat_part(part: TensorPart, flat: FlatLayout) -> BoxLayout:
    """Tell how the ranges of a part that some ranks share among themselves lie in the whole tensor."""
    boxes = (tuple(region for box in flat.regions_of(rank) for region, _ in part.outward(box)) for rank in flat.ranks)
    return BoxLayout(part.layout.shape, flat.ranks, tuple(boxes))


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Tell without importing DTensor, which takes as long as half of torch: nobody has one who did not import it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


_GRIDS: WeakKeyDictionary[Any, tuple[tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()


def _grid_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks and the shape of a mesh, which torch computes anew whenever it is asked."""
    if mesh not in _GRIDS:
        _GRIDS[mesh] = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)
    return _GRIDS[mesh]


_shared = lru_cache(4096)(Layout)  # a model has many tensors, and few layouts, each of which computes its regions once


def _cut(placement: Any) -> int | None:
    if type(placement).__name__ == "Shard":
        return placement.dim
    if type(placement).__name__ == "Replicate" or _is_sum(placement):
        return None
    raise UnsupportedError(
        f"A layout knows dimensions that are sharded, replicas and partial sums. Found the placement {placement}. "
        "Redistribute the DTensor to Shard or Replicate first."
    )


def _is_sum(placement: Any) -> bool:
    return type(placement).__name__ == "Partial" and placement.reduce_op == "sum"
