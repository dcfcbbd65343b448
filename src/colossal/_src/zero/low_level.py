"""Low-level ZeRO: an optimizer whose states, and maybe gradients, are partitioned over data-parallel ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossal._src.amp import LossScaler
from colossal._src.comm import Partition
from colossal._src.interface import (
    Clipping,
    FullOptimizerSpec,
    OptimizerWrapper,
    Peers,
    check_dense_gradients,
    check_equal_rounding,
    check_equal_writes,
    check_optimizer,
    has_master_weight,
)
from colossal._src.zero.flat_parameters import FlatParameters
from colossal._src.zero.zero_config import ZeroConfig
from colossal._src.zero.zero_shards import ZeroShards
from colossal.errors import ConfigError


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


def shard_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    partition_of: Callable[[nn.Parameter], Partition],
    config: ZeroConfig,
    *,
    scaler: LossScaler | None = None,
    clipping: Clipping = Clipping(),  # noqa: B008 (frozen)
    units: Sequence[nn.Module] = (),
    peers: Peers | None = None,
    param_names: Mapping[nn.Parameter, str] | None = None,
    full_spec: FullOptimizerSpec | None = None,
) -> OptimizerWrapper:
    """Let an optimizer update this rank's shards of a model's parameters."""
    check_optimizer(optimizer, shards=True)
    # a plan is made on a fake process group, with parameters on the meta device
    _check_model(model, optimizer, config, needs_values=dist.get_backend() != "fake")
    names = param_names or {parameter: name for name, parameter in model.named_parameters()}
    if any(partition_of(each).world_size > 1 for each in model.parameters()):
        check_equal_writes(model)
    shards = ZeroShards(optimizer, model.parameters(), partition_of, config)
    if config.overlap_allgather:
        wait_before_use(model, units, shards)
    return OptimizerWrapper(optimizer, scaler, names, shards, clipping.max_norm, clipping.norm_type, peers, full_spec)


def _check_model(model: nn.Module, optimizer: Optimizer, config: ZeroConfig, needs_values: bool) -> None:
    if config.fp8_communication:
        check_equal_rounding(model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        name = names.get(parameter, "a parameter of the optimizer")
        if has_master_weight(parameter):
            raise ConfigError(
                f"A boosted model has one optimizer. Found {name}, which another boosted one updates. Build a new "
                "model, and load a checkpoint into it."
            )
        is_plain = parameter.is_floating_point() and type(parameter.data) is torch.Tensor
        if not is_plain or (parameter.is_meta and needs_values):
            raise ConfigError(
                "ZeRO shards plain floating-point parameters that have values. Found "
                f"{name}: {type(parameter.data).__name__} in {parameter.dtype} on {parameter.device}. Build the model "
                "on a real device, and leave parameters of other kinds out of the optimizer."
            )
    check_dense_gradients(model, "ZeRO")
