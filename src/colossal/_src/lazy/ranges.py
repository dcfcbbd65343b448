"""A range of the elements of a lazy tensor, from as little as can be."""

import torch

from colossal._src.lazy.recipe import LATEST, Operation, View
from colossal._src.lazy.stored_tensor import StoredTensor

_aten = torch.ops.aten
COPIES = {_aten._to_copy.default, _aten.clone.default}  # noqa: SLF001 (what `to` calls)
"""Operations that copy each element by itself."""


def read_range(view: View, begin: int, end: int, index: int = LATEST) -> torch.Tensor:
    """Materialize a range of the elements of a view.

    Of a tensor that is stored in a file, or a copy of it in another dtype, only the range is read. Any other tensor is
    computed in full, and then sliced.
    """
    _, event = view.recipe.event_before(index)
    if isinstance(event, Operation) and generates_in_order(view, event):
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


def generates_in_order(view: View, event: Operation) -> bool:
    """Whether an operation makes a storage whose elements are in the same order as in the view."""
    made = next((each for each in event.made.values() if each.recipe is view.recipe), None)
    return made is not None and _is_plain(made) and _is_plain(view) and made.meta.dtype == view.meta.dtype


def _is_plain(view: View) -> bool:
    return view.meta.is_contiguous() and not (view.meta.is_conj() or view.meta.is_neg())
