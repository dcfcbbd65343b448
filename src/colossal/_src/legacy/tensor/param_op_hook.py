"""Hooks on the operations that take parameters, forward and backward, by the older names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import nn

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.tensor.sharding import TensorSharding, map_tensors, sharding_of, tensors_in

_Compute = Callable[[Sequence[Any], Mapping[str, Any]], Any]
_Wrap = Callable[[torch.Tensor, TensorSharding], torch.Tensor]


class ColoParamOpHook(ABC):
    """What is called around each operation that takes parameters of a model of `ColoParameter`."""

    @abstractmethod
    def pre_forward(self, params: list[torch.Tensor]) -> None:
        """Called before the operation.

        Args:
            params: The parameters that it takes.
        """

    @abstractmethod
    def post_forward(self, params: list[torch.Tensor]) -> None:
        """Called after the operation.

        Args:
            params: The parameters that it took.
        """

    @abstractmethod
    def pre_backward(self, params: list[torch.Tensor]) -> None:
        """Called before the gradients of the operation are computed.

        Args:
            params: The parameters that it took.
        """

    @abstractmethod
    def post_backward(self, params: list[torch.Tensor]) -> None:
        """Called after the gradients of the operation are computed, and before they are added up in ``grad``.

        Args:
            params: The parameters that it took.
        """


_active: ContextVar[tuple[ColoParamOpHook, ...]] = ContextVar("colossal_param_op_hooks", default=())


@final
class ColoParamOpHookManager:
    """Says which hooks are called."""

    @staticmethod
    @contextmanager
    def use_hooks(*hooks: ColoParamOpHook) -> Iterator[None]:
        """Open a context in which hooks are called; in a nested one, only those of the inner.

        Their backward methods are called whenever the gradients are computed, also after the context.

        Args:
            *hooks: The hooks, in the order in which they are called.
        """
        superseded(
            "colossal.tensor.param_op_hook.ColoParamOpHookManager",
            "torch.nn.Module.register_forward_pre_hook and register_full_backward_hook",
        )
        token = _active.set(hooks)
        try:
            yield
        finally:
            _active.reset(token)

    @staticmethod
    def has_hook() -> bool:
        """Return whether hooks are called.

        Returns:
            True in a context of `use_hooks` with at least one.
        """
        return has_param_hooks()


def has_param_hooks() -> bool:
    """Whether hooks are called."""
    return bool(_active.get())


def run_with_hooks(compute: _Compute, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: _Wrap) -> Any:
    """Compute an operation, and call the hooks around it if it takes parameters."""
    taken = {id(each): each for each in tensors_in([*args, *kwargs.values()])}
    params: list[torch.Tensor] = [each for each in taken.values() if isinstance(each, nn.Parameter)]
    if not params:
        return compute(args, kwargs)
    hooks = _active.get()
    for hook in hooks:
        hook.pre_forward(params)
    differentiated = [each for each in taken.values() if each.requires_grad] if torch.is_grad_enabled() else []
    if differentiated:
        # Views, so that the graph has a place after the gradients of the operation, and one before.
        replace = _views(_BeforeForward, hooks, params, differentiated, wrap)
        args, kwargs = (map_tensors(each, replace) for each in (tuple(args), dict(kwargs)))
    result = compute(args, kwargs)
    for hook in hooks:
        hook.post_forward(params)
    made = [each for each in tensors_in(result) if each.requires_grad]
    if differentiated and made:
        result = map_tensors(result, _views(_AfterForward, hooks, params, made, wrap))
    return result


def _views(
    function: Any,
    hooks: Sequence[ColoParamOpHook],
    params: list[torch.Tensor],
    tensors: list[torch.Tensor],
    wrap: _Wrap,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Look at tensors through a function; return what replaces them by their views, which are distributed as they."""
    views: list[torch.Tensor] = list(function.apply(hooks, params, *tensors))
    known = [sharding_of(each) for each in tensors]
    wrapped = [view if how is None else wrap(view, how) for view, how in zip(views, known, strict=True)]
    by_id = {id(each): view for each, view in zip(tensors, wrapped, strict=True)}
    return lambda tensor: by_id.get(id(tensor), tensor)


class _BeforeForward(torch.autograd.Function):
    """The identity of what an operation takes; its backward pass follows that of the operation."""

    @staticmethod
    def forward(ctx: Any, hooks: Any, params: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks, ctx.params = hooks, params
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        for hook in ctx.hooks:
            hook.post_backward(ctx.params)
        return (None, None, *grads)


class _AfterForward(torch.autograd.Function):
    """The identity of what an operation makes; its backward pass precedes that of the operation."""

    @staticmethod
    def forward(ctx: Any, hooks: Any, params: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks, ctx.params = hooks, params
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        for hook in ctx.hooks:
            hook.pre_backward(ctx.params)
        return (None, None, *grads)
