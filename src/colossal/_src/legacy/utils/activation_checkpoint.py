"""Activation checkpointing, with the inputs in host memory if asked for."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint as torch_checkpoint

from colossal._src.legacy.context.seeds import get_states, set_seed_states
from colossal.accelerator import get_accelerator
from colossal.errors import UnsupportedError


def checkpoint(function: Callable[..., Any], activation_offload: bool, *args: Any, use_reentrant: bool = True) -> Any:
    """Compute a function without storing its activations; the backward pass computes them again.

    Random numbers are drawn again as they were, those of the generators of parallel modes included.

    Args:
        function: Part of a model.
        activation_offload: Keep the inputs in host memory until the backward pass.
        *args: Inputs of the function; one of them must require a gradient with `use_reentrant`.
        use_reentrant: The implementation of `torch.utils.checkpoint.checkpoint`.

    Returns:
        What the function returns.

    Raises:
        UnsupportedError: `activation_offload` without `use_reentrant`, which keeps the inputs where they are.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import checkpoint
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> checkpoint(torch.square, True, x).backward()
        >>> x.grad
        tensor([4.])
    """
    if activation_offload and not use_reentrant:
        raise UnsupportedError(
            "Inputs are moved to host memory where autograd saves them. Found activation_offload=True with "
            "use_reentrant=False, under which it does not save them. Pass use_reentrant=True."
        )
    context = save_on_cpu(pin_memory=not get_accelerator().is_cpu) if activation_offload else nullcontext()
    with context:
        return torch_checkpoint.checkpoint(_with_seeds(function), *args, use_reentrant=use_reentrant)


def _with_seeds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let each call draw what the first one drew from the generators of parallel modes; torch restores its own."""
    first, num_calls = get_states(copy=True), 0
    if not first:
        return function

    def call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            return function(*args)
        now = get_states(copy=True)
        try:
            _set_states(first)
            return function(*args)
        finally:
            _set_states(now)

    return call


def _set_states(states: dict[Any, Any]) -> None:
    for mode, state in states.items():
        set_seed_states(mode, state)
