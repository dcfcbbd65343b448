"""Activation checkpointing, with the inputs in host memory if asked for."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint as torch_checkpoint

from colossal._src.legacy.context.seeds import get_states, set_seed_states
from colossal.accelerator import get_accelerator


def checkpoint(function: Callable[..., Any], activation_offload: bool, *args: Any, use_reentrant: bool = True) -> Any:
    """Compute a function without storing its activations; the backward pass computes them again.

    Random numbers are drawn again as they were, those of the generators of parallel modes included.

    Args:
        function: Part of a model.
        activation_offload: Keep the inputs in host memory until the backward pass.
        *args: Inputs of the function.
        use_reentrant: The implementation of `torch.utils.checkpoint.checkpoint`. Where no input requires a gradient, as
            in the first layers of a model, it is the other one, under which parameters have gradients all the same.

    Returns:
        What the function returns.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import checkpoint
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> checkpoint(torch.square, True, x).backward()
        >>> x.grad
        tensor([4.])
    """
    use_reentrant = use_reentrant and any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
    if activation_offload and not use_reentrant:
        # Autograd does not save these inputs, the graph holds them: so it holds copies in host memory.
        devices = [each.device if isinstance(each, torch.Tensor) else None for each in args]
        args = tuple(each.cpu() if isinstance(each, torch.Tensor) else each for each in args)
        return torch_checkpoint.checkpoint(_with_seeds(_from_host(function, devices)), *args, use_reentrant=False)
    context = save_on_cpu(pin_memory=not get_accelerator().is_cpu) if activation_offload else nullcontext()
    with context:
        return torch_checkpoint.checkpoint(_with_seeds(function), *args, use_reentrant=use_reentrant)


def _from_host(function: Callable[..., Any], devices: Sequence[torch.device | None]) -> Callable[..., Any]:
    """Let a function take its inputs from host memory."""

    def call(*args: Any) -> Any:
        pairs = zip(args, devices, strict=True)
        return function(*(each if device is None else each.to(device) for each, device in pairs))

    return call


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
