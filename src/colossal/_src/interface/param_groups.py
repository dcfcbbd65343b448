"""An optimizer that was built of full parameters, and updates what a rank has of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def rebind_param_groups(
    optimizer: Optimizer,
    held: Mapping[nn.Parameter, nn.Parameter | None],
    shard_like: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace full parameters by what this rank has of them, if anything, and shard their state the same way."""
    state: Any = optimizer.state  # keyed by parameters, whatever torch declares
    for group in optimizer.param_groups:
        for full in group["params"]:
            shard = held.get(full)
            if shard is not None and shard is not full and full in state:
                state[shard] = {
                    name: shard_like(value, shard) if _is_elementwise(name, value, full) else value
                    for name, value in state.pop(full).items()
                }
            elif full in held and shard is None:
                state.pop(full, None)
        here = dict.fromkeys(held.get(full, full) for full in group["params"])
        group["params"][:] = [shard for shard in here if shard is not None]  # in place: LBFGS keeps this very list


def has_uniform_state(optimizer: Optimizer) -> bool:
    """Whether each state is one number for all elements, as in constructors; then any shard of it is known."""
    return all(
        _is_uniform(name, value, full) for full, states in optimizer.state.items() for name, value in states.items()
    )


def uniform_state_like(value: torch.Tensor, shard: nn.Parameter) -> torch.Tensor:
    """Make the shard of a uniform state."""
    return torch.full_like(shard, value.flatten()[0].item(), dtype=value.dtype, requires_grad=False)


def _is_uniform(name: str, value: object, full: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is None or isinstance(value, bool | int | float | str)
    if value.numel() <= 1:
        return True
    return _is_elementwise(name, value, full) and bool((value == value.flatten()[0]).all())


def _is_elementwise(name: str, value: object, full: torch.Tensor) -> bool:
    # the step of a parameter without dimensions has its shape, and belongs to every shard
    return isinstance(value, torch.Tensor) and value.shape == full.shape and name != "step"
