"""Rejects torch's clipping functions where they would see only some of the gradients."""

import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad

from colossal.errors import ConfigError

_FRAMES = 6
"""As far down the stack is looked: a function of torch, its list, and the generators of a module."""


class _CheckedNames:
    """Takes the place of `named_parameters` in a user's own model, until the model is boosted with full gradients."""

    __func__ = staticmethod(nn.Module.named_parameters)  # what torch.compile asks of a method, and traces

    def __init__(self, model: nn.Module) -> None:
        # not the model itself, which would be freed by the garbage collector only
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters, unless a clipping function of torch asks."""
        refuse_clipping()
        model: Any = self._model()
        yield from type(model).named_parameters(model, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the check out of copies of the model, which are plain models, and out of files."""
        model: Any = self._model()
        return partial, (type(model).named_parameters, model)


def forbid_clipping(model: nn.Module) -> None:
    """Reject torch's clipping functions on the parameters of a model, as they are when its `parameters` are asked."""
    vars(model)["named_parameters"] = _CheckedNames(model)


def allow_clipping(model: nn.Module) -> None:
    """Undo `forbid_clipping`."""
    if isinstance(vars(model).get("named_parameters"), _CheckedNames):
        del vars(model)["named_parameters"]


def refuse_clipping() -> None:
    """Raise an error if one of torch's functions that clip gradients goes through parameters."""
    if _is_clipping():
        raise ConfigError(
            "Gradients that are sharded over ranks, or that are in master weights, must be clipped by the boosted "
            "optimizer. Found a call of torch.nn.utils.clip_grad_norm_ or clip_grad_value_ on the boosted model, "
            "which would clip the gradients of each rank by a different norm, or none. Call "
            "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(value), or pass max_norm to the "
            "Booster."
        )


def _is_clipping() -> bool:
    """Whether one of torch's functions that clip gradients goes through parameters, directly or in a generator."""
    frame = sys._getframe()  # noqa: SLF001 (the only way to find the caller)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == clip_grad.__file__:
            return True
        frame = frame.f_back
    return False
