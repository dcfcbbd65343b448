"""Let an optimizer that the user built for full parameters update shards of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.tensor import copy_placement, placement_of


def rebind_param_groups(
    optimizer: Optimizer, groups: list[dict[str, Any]], shards: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Replace the parameters in the groups of an optimizer by shards, and shard existing states like them."""
    state: Any = optimizer.state
    for group in groups:
        held = group["params"]
        for parameter in held:
            if parameter in state:
                state[shards[parameter]] = _shard_state(state.pop(parameter), parameter, shards[parameter])
        held[:] = [shards[parameter] for parameter in held]


def _shard_state(entries: dict[str, Any], full: nn.Parameter, shard: nn.Parameter) -> dict[str, Any]:
    return {
        name: _shard_like(value, shard)
        if isinstance(value, torch.Tensor) and value.shape == full.shape and name != "step"
        else value
        for name, value in entries.items()
    }


def _shard_like(value: torch.Tensor, shard: nn.Parameter) -> torch.Tensor:
    sharded = copy_placement(torch.empty(shard.shape, dtype=value.dtype, device=shard.device), shard)
    for region, view in placement_of(sharded).local_views(sharded):
        view.copy_(value[region.slices])
    return sharded
