"""From a full tensor to the parts of ranks, and back, without communication."""

from collections.abc import Mapping
from itertools import product

import torch

from colossal._src.tensor.layout import Layout
from colossal.errors import ShapeError


def shard(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Take the part of a rank.

    Args:
        full: The full tensor, of the layout's shape.
        layout: The layout to shard it to.
        rank: A global rank.

    Returns:
        What the rank holds, in a new tensor of `layout.local_shape(rank)`. Of partial sums, the first rank has the
        full summand, and the others zeros.

    Raises:
        ShapeError: The tensor has another shape.
        PlanError: The rank holds no part of it.

    Example:
        >>> import torch
        >>> from colossal.tensor import Layout, shard
        >>> qkv = torch.arange(6)  # two rows each of query, key and value
        >>> shard(qkv, Layout.parse("S0", (6,), grid=(2,), groups=[(2, 2, 2)]), rank=1)
        tensor([1, 3, 5])
    """
    _check_shape(full, layout.shape, "The full tensor")
    place = layout.coordinate_of(rank)
    # Of partial sums the first rank has everything, so that they add up to the tensor.
    if any(place[axis] for axis in layout.partial):
        return full.new_zeros(layout.local_shape(rank))
    part = full
    for dim in range(full.dim()):
        blocks = [part.narrow(dim, at, length) for at, length in layout.extents(dim, place)]
        part = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)
    # A view would keep the memory of the full tensor.
    return part.clone(memory_format=torch.contiguous_format)


def unshard(parts: Mapping[int, torch.Tensor], layout: Layout) -> torch.Tensor:
    """Put a tensor together.

    Args:
        parts: What each rank holds; of ranks that hold the same, one is enough.
        layout: The layout of the tensor.

    Returns:
        The full tensor; partial sums are added up.

    Raises:
        ShapeError: A part is missing, or has another shape than the layout says.

    Example:
        >>> import torch
        >>> from colossal.tensor import Layout, unshard
        >>> unshard({0: torch.tensor([1]), 1: torch.tensor([2])}, Layout.parse("S0", (2,), grid=(2,)))
        tensor([1, 2])
    """
    full: torch.Tensor | None = None
    used_axes = {axis for axes in (*layout.dims, layout.partial) for axis in axes}
    seen: set[tuple[int, ...]] = set()
    for rank, place in layout.coordinates.items():
        key = _key(place, used_axes)
        # Parts are added up, so replicas must count once.
        if rank not in parts or key in seen:
            continue
        seen.add(key)
        part = parts[rank]
        _check_shape(part, layout.local_shape(rank), f"The part of rank {rank}")
        full = part.new_zeros(layout.shape) if full is None else full
        _add(full, part, layout, place)
    missing = [rank for rank, place in layout.coordinates.items() if _key(place, used_axes) not in seen]
    if full is None or missing:
        raise ShapeError(
            f"A full tensor needs the local shards of all ranks. Found none for the ranks {missing}. "
            "Pass the shards of these ranks too."
        )
    return full


def _key(place: tuple[int, ...], used_axes: set[int]) -> tuple[int, ...]:
    return tuple(index for axis, index in enumerate(place) if axis in used_axes)


def _add(full: torch.Tensor, part: torch.Tensor, layout: Layout, place: tuple[int, ...]) -> None:
    """Add a part to where it belongs."""
    extents = [layout.extents(dim, place) for dim in range(full.dim())]
    for blocks in product(*(_pairs(pairs) for pairs in extents)):
        source, target = part, full
        for dim, (here, there, length) in enumerate(blocks):
            source, target = source.narrow(dim, here, length), target.narrow(dim, there, length)
        target += source


def _pairs(extents: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    """Where the blocks of a dimension start in the shard and in the full tensor, and how long they are."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for start, length in extents:
        found.append((at, start, length))
        at += length
    return found


def _check_shape(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            f"{name} must have the shape that the layout says, {shape}. Found {tuple(tensor.shape)}. Pass that one, or "
            "the layout of this one."
        )
