"""An optimizer that the user built for whole parameters, updating shards of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossal.tensor import copy_placement, placement_of


def rebind_param_groups(
    optimizer: Optimizer, groups: list[dict[str, Any]], shards: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Let groups of an optimizer hold shards; state that is there already is cut like the parameter."""
    state: Any = optimizer.state
    for group in groups:
        held = group["params"]
        for parameter in held:
            if parameter in state:
                state[shards[parameter]] = _shard_state(state.pop(parameter), parameter, shards[parameter])
        held[:] = [shards[parameter] for parameter in held]


def _shard_state(entries: dict[str, Any], whole: nn.Parameter, shard: nn.Parameter) -> dict[str, Any]:
    return {
        name: _shard_like(value, shard)
        if isinstance(value, torch.Tensor) and value.shape == whole.shape and name != "step"
        else value
        for name, value in entries.items()
    }


def _shard_like(value: torch.Tensor, shard: nn.Parameter) -> torch.Tensor:
    cut = copy_placement(torch.empty(shard.shape, dtype=value.dtype, device=shard.device), shard)
    for region, box in placement_of(cut).local_views(cut):
        box.copy_(value[region.slices])
    return cut
