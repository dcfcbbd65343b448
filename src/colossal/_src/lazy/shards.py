"""What a rank holds of a lazy tensor, from as little as can be."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from colossal._src.lazy.ranges import COPIES, generates_in_order
from colossal._src.lazy.recipe import LATEST, Operation, View
from colossal._src.lazy.stored_tensor import StoredTensor
from colossal._src.tensor import Layout, Region

_aten = torch.ops.aten

Reader = Callable[[Region], torch.Tensor]
"""Returns the values of a region of a tensor, in newly allocated memory."""


def reader_of(view: View, index: int = LATEST) -> Reader | None:
    """Return a function that reads only a region of a tensor from files, if there is a way.

    There is one for tensors stored in a file, copies of them in another dtype, and concatenations of several tensors,
    such as the experts of a layer.
    """
    _, event = view.recipe.event_before(index)
    if not (isinstance(event, Operation) and generates_in_order(view, event) and view.is_full):
        return None
    if isinstance(event.func, StoredTensor):
        return event.func.read_region
    if event.func in COPIES and event.args[0].meta.shape == view.meta.shape:
        inner = reader_of(event.args[0], event.index)
        return None if inner is None else _copying(event, inner)
    if event.func in (_aten.cat.default, _aten.stack.default):
        parts = list(event.args[0])
        readers = [reader_of(part, event.index) if isinstance(part, View) else None for part in parts]
        if all(part.meta.dtype == view.meta.dtype for part in parts) and None not in readers:
            dim = event.args[1] if len(event.args) > 1 else event.kwargs.get("dim", 0)
            return _joining(view, parts, readers, dim % view.meta.dim(), event.func is _aten.stack.default)
    return None


def read_shard(reader: Reader, view: View, layout: Layout, rank: int) -> torch.Tensor:
    """Read what a rank holds."""
    regions = layout.regions_of(rank)
    if len(regions) == 1:
        return reader(regions[0])
    place = layout.coordinate_of(rank)
    part = torch.empty(layout.local_shape(rank), dtype=view.meta.dtype, device=view.recipe.device)
    for region, at in zip(regions, product(*(_starts(layout, dim, place) for dim in range(part.dim()))), strict=True):
        part[Region(at, region.shape).slices] = reader(region)
    return part


def _starts(layout: Layout, dim: int, place: Sequence[int]) -> list[int]:
    """Where the extents of a dimension start in the local tensor of a rank."""
    lengths = [length for _, length in layout.extents(dim, place)]
    return [sum(lengths[:number]) for number in range(len(lengths))]


def _copying(copy: Operation, inner: Reader) -> Reader:
    options = {name: value for name, value in copy.kwargs.items() if name != "memory_format"}
    return lambda region: copy.func(inner(region), *copy.args[1:], **options)


def _joining(view: View, parts: Sequence[View], readers: Sequence[Any], dim: int, stacks: bool) -> Reader:
    """Read a region of a concatenation, from those of its inputs that overlap it."""

    def read(region: Region) -> torch.Tensor:
        made = torch.empty(region.shape, dtype=view.meta.dtype, device=view.recipe.device)
        at = 0
        for part, reader in zip(parts, readers, strict=True):
            length = 1 if stacks else part.meta.shape[dim]
            begin, end = max(region.start[dim], at), min(region.start[dim] + region.shape[dim], at + length)
            if begin < end:
                place = made.narrow(dim, begin - region.start[dim], end - begin)
                start, shape = list(region.start), list(region.shape)
                start[dim], shape[dim] = begin - at, end - begin
                if stacks:
                    del start[dim], shape[dim]
                place.copy_(reader(Region(tuple(start), tuple(shape))).view(place.shape))
            at += length
        return made

    return read
