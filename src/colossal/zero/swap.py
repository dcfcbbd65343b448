"""An optimizer that the user built for whole parameters, updating shards of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossal.errors import UnsupportedError
from colossal.tensor import boxes_of, mark_like

# [Note: optimizers on ranges] Those that treat each element by itself work on ranges of parameters without knowing of
# them, and those of colossal.nn.optimizer know. These of torch look at more than that.
_NOT_ON_RANGES = {
    "LBFGS": ("takes inner products over all parameters", "torch.optim.AdamW"),
    "Adafactor": ("keeps sums over rows and columns of whole matrices", "colossal.nn.optimizer.DistributedAdaFactor"),
    "Muon": ("multiplies whole matrices", "torch.optim.AdamW"),
    "SparseAdam": ("takes sparse gradients", "torch.optim.AdamW"),
}


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that are wrong on ranges of parameters.

    Args:
        optimizer: As the user built it.

    Raises:
        UnsupportedError: It looks at more than one element of a parameter at once, and does not know of ranges.

    Example:
        >>> import torch
        >>> from colossal.zero.swap import check_optimizer
        >>> check_optimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    """
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _NOT_ON_RANGES:
            reason, instead = _NOT_ON_RANGES[kind.__name__]
            raise UnsupportedError(
                f"Under ZeRO an optimizer sees ranges of parameters. Found {type(optimizer).__name__}, which {reason}. "
                f"Take {instead}, or TorchDDPPlugin."
            )


def swap_parameters(
    optimizer: Optimizer, groups: list[dict[str, Any]], shards: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Let groups of an optimizer hold shards; state that is there already is cut like the parameter.

    Args:
        optimizer: Whose state is cut.
        groups: Changed in place.
        shards: The shard of each parameter.

    Example:
        >>> import torch
        >>> from colossal.zero.swap import swap_parameters
        >>> whole, shard = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([whole])
        >>> swap_parameters(optimizer, optimizer.param_groups, {whole: shard})
        >>> optimizer.param_groups[0]["params"][0] is shard
        True
    """
    state: Any = optimizer.state
    for group in groups:
        held = group["params"]
        for parameter in held:
            if parameter in state:
                state[shards[parameter]] = _cut(state.pop(parameter), parameter, shards[parameter])
        held[:] = [shards[parameter] for parameter in held]


def _cut(entries: dict[str, Any], whole: nn.Parameter, shard: nn.Parameter) -> dict[str, Any]:
    return {
        name: _cut_like(value, shard)
        if isinstance(value, torch.Tensor) and value.shape == whole.shape and name != "step"
        else value
        for name, value in entries.items()
    }


def _cut_like(value: torch.Tensor, shard: nn.Parameter) -> torch.Tensor:
    cut = mark_like(torch.empty(shard.shape, dtype=value.dtype, device=shard.device), shard)
    for region, box in boxes_of(cut):
        box.copy_(value[region.slices])
    return cut
