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


class ScaledGradient:
    """What parameters become while their gradients may be scaled: the same objects, of a class of both kinds."""

    plain: type[nn.Parameter]

    @property
    def grad(self: Any) -> torch.Tensor | None:
        """The gradient, which is unscaled first if a clipping function of torch asks."""
        grad = grad_of(self)
        if grad is None or sys._getframe(1).f_globals is not _OF_CLIPPING:  # noqa: SLF001 (who asks is found nowhere else)
            return grad
        of_optimizer = _UNSCALE.get(self)  # a view has none
        unscale = None if of_optimizer is None else of_optimizer()
        if unscale is not None:
            unscale()
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


def unscale_for_clipping(parameter: nn.Parameter, unscale: WeakMethod[Any]) -> None:
    """Have gradients unscaled when a clipping function of torch asks a parameter for its own."""
    if type(parameter) is nn.Parameter or local_of(parameter) is not parameter:  # not those fetched or quantized
        _UNSCALE[parameter] = unscale
        parameter.__class__ = kind_of_scaled(parameter, type(parameter))


def any_scaled() -> bool:
    """Whether the gradient of any parameter may be scaled: most programs scale none, and need not look at each."""
    return bool(_UNSCALE)


def kind_of_scaled(parameter: torch.Tensor, plain: Any) -> Any:
    """Choose the class of a parameter: a plain one, or the one below it if its gradient may be scaled."""
    return _scaled(plain) if parameter in _UNSCALE else plain


def expect_unscaled(parameter: Any) -> None:
    """Make a parameter a plain one again, whose gradient is not scaled."""
    if issubclass(type(parameter), ScaledGradient):
        parameter.__class__ = parameter.plain
        del _UNSCALE[parameter]


@cache
def _scaled(plain: Any) -> Any:
    """Make a class below nn.Parameter, or below DTensor, which parameters are under FSDP."""
    fields = {"plain": plain, "__module__": __name__}
    return new_class(f"Scaled{plain.__name__}", (ScaledGradient, plain), exec_body=lambda body: body.update(fields))


def _as_plain(parameter: Any, make: Any) -> Any:
    kind, parameter.__class__ = type(parameter), parameter.plain
    try:
        return make()
    finally:
        parameter.__class__ = kind
