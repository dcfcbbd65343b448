"""Models that cannot be sharded, and modules of a model that must not be."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import CallOfAllRanks, equal_on_all_ranks, int64_digest
from colossal._src.interface import check_dense_gradients, check_unwritten_weights
from colossal._src.tensor import DATA, is_dtensor, placement_of, refuse_gradient_hooks
from colossal.errors import ConfigError, UnsupportedError


def check_values(model: nn.Module) -> None:
    """Reject models whose parameters are on the meta device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise ConfigError(
            f"TorchFSDPPlugin shards parameters that have values. Found {empty[0]} on the meta device. "
            "Build the model on a real device, or inside of LazyInitContext; with sync_module_states=True only the "
            "values of rank 0 count."
        )


def check_fully_shardable(model: nn.Module) -> None:
    """Reject models that FSDP2 would fail on later, or train wrongly."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if any(isinstance(each, FSDPModule) for each in model.modules()) or any(
        isinstance(each, DTensor) for each in model.parameters()
    ):
        raise ConfigError(
            "TorchFSDPPlugin shards the parameters of a plain model in place, once. Found a model that is sharded "
            "already. Build a new one, and load a checkpoint into it."
        )
    tp_sharded = next((name for name, each in model.named_parameters() if placement_of(each).is_compute_sharded), None)
    if tp_sharded is not None:
        raise UnsupportedError(
            f"FSDP2 shards full parameters. Found {tp_sharded}, of which this rank has a shard already, on the mesh's "
            "tp or ep axis. Train layers of colossal.nn on such a mesh with TorchDDPPlugin, LowLevelZeroPlugin or "
            "GeminiPlugin, or use torch.nn's layers and HybridParallelPlugin."
        )
    refuse_gradient_hooks(model.named_parameters(), "FSDP2")
    check_dense_gradients(model, "FSDP2")
    check_unwritten_weights(model, "FSDP2")


def find_ignored(model: nn.Module, modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Collect the parameters that stay unsharded on every rank because the user asked for it."""
    names = {module: name for name, module in model.named_modules()}
    for module in modules:
        if module not in names:
            raise ConfigError(
                f"ignored_modules must belong to the boosted model. Found {type(module).__name__}, which does not. "
                "Pass modules of model.modules()."
            )
        training = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if training:
            raise ConfigError(
                "Gradients of ignored_modules are not averaged, so that ranks would drift apart. Found "
                f"{names[module]} with trainable parameters: {', '.join(training[:3])}. Freeze them by "
                "requires_grad_(False), or leave the module out of ignored_modules."
            )
    return {parameter for module in modules for parameter in module.parameters()}


def refuse_assigned_state(
    module: nn.Module, _state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_found: object
) -> None:
    """Reject a state dict whose tensors are to take the place of shards, which FSDP2 gathers and an optimizer has."""
    named = [name for name, _ in module.named_parameters(recurse=False)]
    if named and metadata.get("assign_to_params_buffers"):
        raise ConfigError(
            "Under TorchFSDPPlugin a model keeps the parameters that it had when it was boosted. Found a "
            f"load_state_dict(..., assign=True), which replaces {prefix}{named[0]}. Leave assign=True out: values are "
            "copied into the parameters that are there."
        )


def check_equal_state(
    mesh: ParallelMesh, module: nn.Module, state: Mapping[str, Any], prefix: str, *_found: object
) -> None:
    """Reject a state dict of full tensors that differs between ranks: a shard of each would make a model of no rank.

    Communication: all_reduce, dp, 16 bytes, for each module that has parameters; not counted.
    """
    named = {f"{prefix}{name}": each for name, each in module.named_parameters(recurse=False) if is_dtensor(each)}
    if not named:
        return
    full = {name: state[name] for name in named if isinstance(state.get(name), torch.Tensor)}
    contents = [each for name, value in full.items() if not is_dtensor(value) for each in (name, value)]
    with CallOfAllRanks("load the state of a model that is sharded, by load_state_dict,"):
        equal = equal_on_all_ranks([int64_digest(*contents)], [mesh.group(DATA)])
    if not all(equal):
        raise ConfigError(
            "Each rank copies its shards from a full state, which is the same on all of them. Found that ranks load "
            f"other values, names or types of {', '.join(named)}. Read the same file on all ranks, or call "
            "booster.load_model(model, file)."
        )


def unit_dtypes(units: Iterable[nn.Module], unsharded: set[nn.Parameter]) -> list[torch.dtype | None]:
    """Find the dtype in which the gradients of each unit are reduced."""
    dtypes: list[torch.dtype | None] = []
    taken = set(unsharded)
    for unit in units:
        unit_params = {name: parameter for name, parameter in unit.named_parameters() if parameter not in taken}
        taken |= set(unit_params.values())
        by_dtype = {parameter.dtype: name for name, parameter in unit_params.items() if parameter.requires_grad}
        if len(by_dtype) > 1:
            examples = " and ".join(f"{name} in {dtype}" for dtype, name in by_dtype.items())
            raise ConfigError(
                f"The trainable parameters of a unit have one dtype. Found {examples} in {type(unit).__name__}. "
                "Convert them, or separate them by auto_wrap_policy."
            )
        dtypes.append(next(iter(by_dtype), None))
    return dtypes
