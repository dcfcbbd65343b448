"""Modules that wait for their own parameters, so that a forward pass begins while others still arrive."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from colossal._src.zero.flat_parameters import FlatParameters
from colossal._src.zero.zero_shards import ZeroShards


def wait_before_use(model: nn.Module, units: Sequence[nn.Module], shards: ZeroShards) -> None:
    """Let each unit of a model wait for its own parameters, and the model itself for the rest.

    Nothing but a unit's own forward pass may use its parameters. Reading and loading a state dict waits for all.
    """
    inside = {parameter for unit in units for parameter in unit.parameters()}
    for unit in units:
        _wait_for(unit, shards, _buckets_of(unit.parameters(), shards))
    _wait_for(model, shards, _buckets_of((each for each in model.parameters() if each not in inside), shards))
    model.register_state_dict_pre_hook(lambda *_: shards.wait())
    model.register_load_state_dict_pre_hook(lambda *_: shards.wait())


def _wait_for(module: nn.Module, shards: ZeroShards, buckets: list[FlatParameters]) -> None:
    module.register_forward_pre_hook(partial(_wait, shards, buckets))


def _wait(shards: ZeroShards, buckets: list[FlatParameters], *_forward: Any) -> None:
    shards.wait(buckets)


def _buckets_of(parameters: Iterable[nn.Parameter], shards: ZeroShards) -> list[FlatParameters]:
    wanted = set(parameters)
    return [bucket for bucket in shards.buckets if not wanted.isdisjoint(bucket.parameters)]
