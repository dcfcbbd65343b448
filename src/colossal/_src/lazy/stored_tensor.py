# pyright: reportUnknownVariableType=false
"""Values that are made in part: what a file has of them, a range of elements, a shard."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, final

import torch
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from colossal._src.lazy.recipe import LATEST, RecordedOperation, View
from colossal._src.tensor import Layout, Region
from colossal.errors import CheckpointError

_CPU = torch.device("cpu")


@final
@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as an operation that makes its values."""

    path: Path  # the file
    name: str  # the name of the tensor in it
    # size and time of the file when its header was read: it must not change until the values are
    stamp: tuple[int, int]

    def __call__(self) -> torch.Tensor:
        """Read all of it."""
        with self._opened() as file:
            return file.get_tensor(self.name).clone()

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Read some of its elements."""
        with self._opened() as file:
            return file.get_tensor(self.name).view(-1)[begin:end].clone()  # the file is mapped: no more is read

    def read_region(self, region: Region) -> torch.Tensor:
        """Read a region of it."""
        with self._opened() as file:
            return file.get_tensor(self.name)[region.slices].clone(memory_format=torch.contiguous_format)

    @contextmanager
    def _opened(self) -> Generator[Any]:
        what = f"the tensor {self.name!r} of {self.path}"
        with opened(self.path, what) as file:
            if stamp_of(self.path) != self.stamp:
                raise CheckpointError(
                    f"Weights are read from their file when they are needed. Found {what}, which was written to since "
                    "the model was built from it. Build the model again, and save to another folder until it has its "
                    "values."
                )
            yield file


def stamp_of(path: Path) -> tuple[int, int]:
    """Size and time of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@contextmanager
def opened(path: Path, what: str) -> Generator[Any]:
    """Open a file for real, whatever contexts are around this one."""
    from safetensors import SafetensorError, safe_open

    try:
        with _disable_current_modes(), torch.device("cpu"), safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Weights are read from their file when they are needed. Found {what}, which cannot be read: {error}. "
            "Leave the file where it is until the model has its values; if it is damaged, copy it again."
        ) from error


_aten = torch.ops.aten
COPIES = {_aten._to_copy.default, _aten.clone.default}  # noqa: SLF001 (what `to` calls)
"""Operations that copy each element by itself."""


def read_range(view: View, begin: int, end: int, index: int = LATEST) -> torch.Tensor:
    """Materialize a range of the elements of a view.

    Of a tensor that is stored in a file, or a copy of it in another dtype, only the range is read. Any other tensor is
    computed in full, and then sliced.
    """
    _, event = view.recipe.event_before(index)
    if isinstance(event, RecordedOperation) and generates_in_order(view, event):
        offset = int(view.meta.storage_offset())
        if isinstance(event.func, StoredTensor):
            return event.func.read(offset + begin, offset + end)
        if event.func in COPIES:
            part = read_range(event.args[0], offset + begin, offset + end, event.index)
            options = {name: value for name, value in event.kwargs.items() if name != "memory_format"}
            return event.func(part, *event.args[1:], **options)
    kept = view.recipe.has_kept
    part = view.on(view.recipe.storage_before(index)).reshape(-1)[begin:end].clone()
    if not kept:
        view.recipe.forget()  # or the full values would stay in memory as long as the tensor
    return part


def generates_in_order(view: View, event: RecordedOperation) -> bool:
    """Whether an operation makes a storage whose elements are in the same order as in the view."""
    made = next((each for each in event.made.values() if each.recipe is view.recipe), None)
    return made is not None and _is_plain(made) and _is_plain(view) and made.meta.dtype == view.meta.dtype


def _is_plain(view: View) -> bool:
    return view.meta.is_contiguous() and not (view.meta.is_conj() or view.meta.is_neg())


Reader = Callable[[Region], torch.Tensor]
"""Returns the values of a region of a tensor, in newly allocated memory."""


def reader_of(view: View, index: int = LATEST) -> Reader | None:
    """Return a function that reads only a region of a tensor from files, if there is a way.

    There is one for tensors stored in a file, copies of them in another dtype, and concatenations of several tensors,
    such as the experts of a layer.
    """
    _, event = view.recipe.event_before(index)
    if not (isinstance(event, RecordedOperation) and generates_in_order(view, event) and view.is_full):
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


def _copying(copy: RecordedOperation, inner: Reader) -> Reader:
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
