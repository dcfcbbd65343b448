"""What operators of torch do, as far as it decides whether they can be recorded, and run later."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from colossal.errors import UnsupportedError

_aten = torch.ops.aten
ALIASING = {
    _aten.t_.default,
    _aten.transpose_.default,
    _aten.unsqueeze_.default,
    _aten.squeeze_.default,
    _aten.squeeze_.dim,
    _aten.squeeze_.dims,
}
"""Those that let a tensor see its storage in another shape, in place."""

SHAPE_ONLY = {_aten.empty_like.default, _aten.zeros_like.default}
"""Those that take only the shape of a tensor: one on the meta device is enough."""

_NEED_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def makes_tensor(func: Any) -> bool:
    """Whether an operator makes a tensor on a device that it is given."""
    return any(argument.name == "device" for argument in func._schema.arguments)  # noqa: SLF001 (as below)


def needs_values(func: Any) -> bool:
    """Whether what an operator returns, or its shape, depends on values."""
    return any(tag in func.tags for tag in _NEED_VALUES)


def aliases_arguments(func: Any) -> bool:
    """Whether an operator writes to an argument, or returns a view of one."""
    return any(argument.alias_info for argument in func._schema.arguments)  # noqa: SLF001 (as below)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Find the arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 (torch has no public API for it)
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))


def refusal_of(func: Any, reason: str) -> UnsupportedError:
    """The error of an operator that cannot be recorded, with the module that is being built."""
    frame, builder = sys._getframe(), "no module"  # noqa: SLF001 (the only way to the module under construction)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if isinstance(own := frame.f_locals.get("self"), nn.Module):
            builder = type(own).__name__
            break
        frame = frame.f_back
    return UnsupportedError(
        f"A model is built lazily by operations that can run later. Found {func} while {builder} was built: {reason}. "
        "Build the model without LazyInitContext, or without this operation."
    )
