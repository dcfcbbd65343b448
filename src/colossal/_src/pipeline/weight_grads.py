"""Backward passes in two parts: first gradients of inputs, for which other ranks wait, and later those of weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from colossal._src.tensor import has_saved_tensor_hooks


@final
class WeightGrads:
    """Gradients of weights of linear layers that are made up for later, for one pass of a micro-batch through a stage.

    Inside of `defer`, linear layers are computed so that their backward pass only makes the gradients of their input
    and bias. No module is changed: calls of `torch.nn.functional.linear` and `torch.addmm` are intercepted. Those
    under `torch.autograd.graph.saved_tensors_hooks` are left as they are, so that the hooks see what they save. So are
    those inside of activation checkpoints, which are such hooks, and whose backward pass computes them again.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241.

    Example:
        >>> import torch
        >>> from colossal.pipeline import WeightGrads
        >>> layer, later = torch.nn.Linear(2, 3), WeightGrads()
        >>> with later.defer():
        ...     loss = layer(torch.ones(4, 2, requires_grad=True)).sum()
        >>> loss.backward()
        >>> layer.weight.grad is None
        True
        >>> later.accumulate()
        >>> layer.weight.grad.shape
        torch.Size([3, 2])
    """

    def __init__(self) -> None:
        self._left: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def add(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        """Remember a gradient.

        Args:
            weight: The parameter.
            compute: Computes its gradient.
        """
        self._left.append((weight, compute))

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Intercept linear layers of forward passes."""
        with _Interception(self):
            yield

    def accumulate(self, backward: Callable[[torch.Tensor, torch.Tensor], object] = torch.autograd.backward) -> None:
        """Compute the gradients that are left, and add them to those of the parameters, whose hooks are called.

        Args:
            backward: Takes a parameter and its gradient: that of an optimizer, or autograd's own.
        """
        # Each closure holds activations, and a gradient must not be added twice.
        left, self._left = self._left, []
        for weight, compute in left:
            # Under autocast the product has a lower precision than the parameter.
            backward(weight, compute().to(weight.dtype))


class _Interception(TorchFunctionMode):
    def __init__(self, later: WeightGrads) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        instead = _DEFERRING.get(func)
        result = instead(self._later, *args, **kwargs) if instead else None
        return func(*args, **kwargs) if result is None else result


class _DeferredGrad(NamedTuple):
    """Where the gradient of a weight goes; in a tuple, autograd does not see the weight."""

    weight: torch.Tensor
    is_transposed: bool
    later: WeightGrads


def _linear(
    later: WeightGrads,
    input: torch.Tensor,  # noqa: A002 (as torch names it)
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    if not _is_deferred(input, weight):
        return None
    return _Linear.apply(input, weight.detach(), bias, _DeferredGrad(weight, False, later))


def _addmm(
    later: WeightGrads,
    input: torch.Tensor,  # noqa: A002 (as torch names it)
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    **others: Any,
) -> torch.Tensor | None:
    if others or input.dim() != 1 or not _is_deferred(mat1, mat2):
        return None
    return _Linear.apply(mat1, mat2.detach().t(), input, _DeferredGrad(mat2, True, later))


def _is_deferred(x: torch.Tensor, weight: torch.Tensor) -> bool:
    # The gradient goes straight to the parameter, so it must be a leaf. Without a gradient of the input no rank waits
    # for this layer, and with the weight hidden from autograd its backward pass might not run at all.
    # What an activation checkpoint computes again is not intercepted, and must save the same tensors as this pass.
    is_wanted = torch.is_grad_enabled() and x.requires_grad and weight.is_leaf and weight.requires_grad
    return is_wanted and not has_saved_tensor_hooks()


_DEFERRING: Mapping[Any, Callable[..., torch.Tensor | None]] = {functional.linear: _linear, torch.addmm: _addmm}


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``; the gradient of the weight is left for later."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deferred: _DeferredGrad
    ) -> torch.Tensor:
        # Autocast does not reach into an autograd function; like torch's own, this leaves float64 as it is.
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.deferred = deferred
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        deferred, rows_x, rows = ctx.deferred, x.flatten(0, -2), grad.flatten(0, -2)
        deferred.later.add(
            deferred.weight, (lambda: rows_x.t() @ rows) if deferred.is_transposed else (lambda: rows.t() @ rows_x)
        )
        return grad @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
