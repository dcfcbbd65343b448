# pyright: reportIncompatibleVariableOverride=false
"""Parameters whose gradients are multiplied by a loss scale, until one of torch's clipping functions asks for them.

Without master weights the gradients are in the parameters of the model, where these functions find them. They would
clip what is a thousand times too long, and the step, which divides by the scale afterwards, would hardly move. So the
first one that asks has all gradients unscaled.
"""

import sys
from copy import deepcopy
from functools import cache
from types import new_class
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from colossal._src.comm import end_graphs_in
from colossal._src.tensor import grad_of, local_of, set_grad

end_graphs_in(__name__)

_OF_CLIPPING = vars(clip_grad)

# apart from the parameters, whose copies and files would otherwise contain the optimizer
_UNSCALE = WeakIdKeyDictionary()


class ScaledShard:
    """What a DTensor becomes while its gradient may be scaled: the same object, of a class of both kinds."""

    plain: Any

    @property
    def grad(self: Any) -> torch.Tensor | None:
        """The gradient, which is unscaled first if a clipping function of torch asks."""
        grad = grad_of(self)
        if grad is not None and sys._getframe(1).f_globals is _OF_CLIPPING:  # noqa: SLF001 (who asks is found nowhere else)
            unscale_for_clipping(self)
        return grad

    @grad.setter
    def grad(self: Any, grad: torch.Tensor | None) -> None:
        set_grad(self, grad)

    @grad.deleter
    def grad(self: Any) -> None:
        set_grad(self, None)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> nn.Parameter:
        """Make a copy that is a plain parameter, as no optimizer has it."""
        return _as_plain(self, lambda: deepcopy(self, memo))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickle it as the plain parameter that it is in a file."""
        return _as_plain(self, lambda: self.__reduce_ex__(protocol))


def expect_scaled(parameter: nn.Parameter, unscale: WeakMethod[Any]) -> None:
    """Remember what unscales the gradient of a parameter, and all others of its optimizer."""
    _UNSCALE[parameter] = unscale
    if local_of(parameter) is not parameter:
        parameter.__class__ = kind_of_shard(parameter, type(parameter))


def expect_unscaled(parameter: Any) -> None:
    """Forget it, as of a parameter whose gradient is not scaled any more."""
    if _UNSCALE.pop(parameter, None) is not None and issubclass(type(parameter), ScaledShard):
        parameter.__class__ = parameter.plain


def may_be_scaled(parameter: torch.Tensor) -> bool:
    """Whether the gradient of a parameter is in full, and may be scaled."""
    return parameter in _UNSCALE


def unscale_for_clipping(parameter: torch.Tensor) -> None:
    """Unscale all gradients of the optimizer that has a parameter."""
    of_optimizer = _UNSCALE.get(parameter)  # a view of a shard has none
    unscale = None if of_optimizer is None else of_optimizer()
    if unscale is not None:
        unscale()


def any_scaled() -> bool:
    """Whether the gradient of any parameter may be scaled: most programs scale none, and need not look at each."""
    return bool(_UNSCALE)


def kind_of_shard(parameter: torch.Tensor, plain: Any) -> Any:
    """Choose the class of a DTensor: a plain one, or the one below it if its gradient may be scaled."""
    return _scaled(plain) if may_be_scaled(parameter) else plain


@cache
def _scaled(plain: Any) -> Any:
    """Make a class below DTensor, or one of its own classes."""
    fields = {"plain": plain, "__module__": __name__}
    return new_class(f"Scaled{plain.__name__}", (ScaledShard, plain), exec_body=lambda body: body.update(fields))


def _as_plain(parameter: Any, make: Any) -> Any:
    kind, parameter.__class__ = type(parameter), parameter.plain
    try:
        return make()
    finally:
        parameter.__class__ = kind
