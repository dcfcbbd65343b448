"""The documented keywords of `TorchFSDPPlugin`, which are those of FSDP1, in the terms of FSDP2's `fully_shard`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from colossal._src.cluster import ParallelMesh
from colossal._src.interface import Keywords
from colossal._src.tensor import DATA
from colossal.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

HYBRID_MESH = (
    'torch.distributed.device_mesh.init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))'
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}


@final
@dataclass(frozen=True)
class MixedPrecisionPolicies:
    """What `fully_shard` casts in the root module, and in the units inside of it."""

    root: "MixedPrecisionPolicy"
    unit: "MixedPrecisionPolicy"


@final
@dataclass(frozen=True)
class FSDPOptions:
    """The options of the user, checked as far as possible without a process group."""

    process_group: Any
    reshard_after_forward: bool
    offload: bool
    auto_wrap_policy: Any
    casts: MixedPrecisionPolicies | None
    ignored_modules: tuple[nn.Module, ...]
    sync_module_states: bool  # start from the values of the first rank
    fp8_communication: bool

    def mesh_for(self, mesh: ParallelMesh) -> DeviceMesh:
        """Return the mesh over which parameters are sharded."""
        group = self.process_group
        if isinstance(group, DeviceMesh):
            if sorted(group.mesh.flatten().tolist()) != sorted(mesh.ranks(DATA)):
                raise ConfigError(
                    f"A mesh of replicas and shards arranges the ranks of the dp axis, {list(mesh.ranks('dp'))}. "
                    f"Found {group.mesh.tolist()}. Make it of these ranks, each once."
                )
            return group
        if group is not None and group is not mesh.group(DATA):
            raise ConfigError(
                "TorchFSDPPlugin shards over the dp axis of the mesh in force. Found a process_group of other ranks. "
                "Leave process_group out, and train inside of `with ParallelMesh(...)` whose dp axis has these ranks."
            )
        return mesh.device_mesh[DATA]

    def check_device(self, device: torch.device) -> None:
        """Refuse to offload to the memory in which the parameters are."""
        if self.offload and device.type == "cpu":
            raise UnsupportedError(
                "cpu_offload moves shards from a GPU to the memory of its host. Found a model on the CPU, whose "
                "parameters are there already. Leave cpu_offload out."
            )

    def check_precision(self, name: str) -> None:
        """Reject a precision of the Booster next to the plugin's own mixed precision."""
        if self.casts is not None:
            raise ConfigError(
                "One of the Booster and the plugin chooses the precision. Found "
                f"Booster(mixed_precision={name!r}) and TorchFSDPPlugin(mixed_precision=...). Leave out one of them."
            )
        if self.offload and name != "fp32":
            raise UnsupportedError(
                "A precision of the Booster works where the parameters are. Found cpu_offload, which keeps them away "
                f"from the GPU, and mixed_precision={name!r}. Pass TorchFSDPPlugin(cpu_offload=True, "
                "mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
            )


def parse_fsdp_options(given: Mapping[str, Any]) -> FSDPOptions:
    """Translate the keywords of the plugin, which are those of FSDP1, as far as `fully_shard` supports them."""
    _check_prefetch(given["backward_prefetch"])
    keywords, group, casts = Keywords("TorchFSDPPlugin", given), given["process_group"], given["mixed_precision"]
    _check_group(group)
    strategy = _strategy_of(given["sharding_strategy"], isinstance(group, DeviceMesh))
    return keywords.read(
        FSDPOptions,
        reshard_after_forward=strategy in {"FULL_SHARD", "HYBRID_SHARD"},
        offload=_offload_of(given["cpu_offload"]),
        casts=None if casts is None else _casts_of(casts),
        ignored_modules=tuple(given["ignored_modules"] or ()),
    )


def _check_prefetch(backward_prefetch: Any) -> None:
    prefetch = _name_of(backward_prefetch)
    if prefetch == "BACKWARD_POST":
        raise UnsupportedError(
            "FSDP2 gathers the next parameters before it computes gradients, which is BACKWARD_PRE. Found "
            "backward_prefetch=BACKWARD_POST. Pass BACKWARD_PRE or leave it out."
        )
    if prefetch not in {None, "BACKWARD_PRE"}:
        raise ConfigError(
            f"backward_prefetch is a member of torch.distributed.fsdp.BackwardPrefetch. Found {backward_prefetch!r}. "
            "Pass BACKWARD_PRE or leave it out."
        )


def _check_group(group: Any) -> None:
    if isinstance(group, DeviceMesh):
        if group.ndim != 2 or group.mesh_dim_names is None:  # noqa: PLR2004 (replicas and shards)
            raise ConfigError(
                "A mesh as process_group has two named dimensions, replicas and shards. Found one with "
                f"{group.ndim}, named {group.mesh_dim_names}. Make it by {HYBRID_MESH}."
            )
    elif group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise ConfigError(
            f"process_group is None, the group of the dp axis, or a mesh of replicas and shards. Found {group!r}. "
            f"Choose ranks by ParallelMesh, or make a mesh by {HYBRID_MESH}."
        )


def _strategy_of(strategy: Any, hybrid_mesh: bool) -> str:
    name = _name_of(strategy)
    if name is None:
        return "HYBRID_SHARD" if hybrid_mesh else "FULL_SHARD"
    if name == "NO_SHARD":
        raise UnsupportedError(
            "TorchFSDPPlugin shards parameters. Found sharding_strategy=NO_SHARD. Use TorchDDPPlugin, which keeps the "
            "full model on every rank."
        )
    if name not in _STRATEGIES:
        raise ConfigError(
            f"sharding_strategy is one of {', '.join(_STRATEGIES)}. Found {strategy!r}. "
            "Pass a member of torch.distributed.fsdp.ShardingStrategy or its name."
        )
    if hybrid_mesh and name in _HYBRID:
        raise ConfigError(
            f"{name} shards over all ranks. Found a mesh of replicas and shards as process_group. "
            f"Pass sharding_strategy={_HYBRID[name]!r}, or leave process_group out."
        )
    if not hybrid_mesh and name in _HYBRID.values():
        raise ConfigError(
            f"{name} needs a mesh of the ranks that hold replicas and those that hold shards. Found none. "
            f"Pass process_group={HYBRID_MESH}."
        )
    return name


def _offload_of(cpu_offload: Any) -> bool:
    found = getattr(cpu_offload, "offload_params", cpu_offload)
    if not isinstance(found, bool | None):
        raise ConfigError(
            "cpu_offload is True, False or a torch.distributed.fsdp.CPUOffload. "
            f"Found {cpu_offload!r}. Pass CPUOffload(offload_params=True) to offload."
        )
    return bool(found)


def _casts_of(mixed_precision: Any) -> MixedPrecisionPolicies:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if isinstance(mixed_precision, MixedPrecision):
        _check_fsdp1_policy(mixed_precision)
        unit = MixedPrecisionPolicy(
            param_dtype=mixed_precision.param_dtype,
            reduce_dtype=mixed_precision.reduce_dtype,
            cast_forward_inputs=mixed_precision.cast_forward_inputs,
        )
        casts = MixedPrecisionPolicies(
            replace(unit, cast_forward_inputs=mixed_precision.cast_root_forward_inputs), unit
        )
    elif isinstance(mixed_precision, MixedPrecisionPolicy):
        casts = MixedPrecisionPolicies(mixed_precision, replace(mixed_precision, output_dtype=None))
    else:
        raise ConfigError(
            "mixed_precision of this plugin is a torch.distributed.fsdp.MixedPrecisionPolicy or MixedPrecision. "
            f"Found {mixed_precision!r}. For a name such as 'bf16', write Booster(mixed_precision='bf16')."
        )
    if casts.root.param_dtype is torch.float16:
        raise UnsupportedError(
            "Gradients in float16 need a loss scale, which mixed_precision of this plugin does not bring. Found "
            "param_dtype=torch.float16. Pass torch.bfloat16, or write Booster(mixed_precision='fp16')."
        )
    return casts


def _check_fsdp1_policy(found: Any) -> None:
    """Reject settings of FSDP1's `MixedPrecision` that FSDP2 does not have."""
    instead = {
        "buffer_dtype": "Convert the buffers before boost.",
        "keep_low_precision_grads": "Leave it False: gradients have the dtype of the parameters.",
        "_module_classes_to_ignore": "Leave it out.",
    }
    for name, advice in instead.items():
        default = type(found).__dataclass_fields__[name].default
        if getattr(found, name) != default:
            raise UnsupportedError(
                f"FSDP2 casts parameters, gradients and inputs of forward passes. Found MixedPrecision({name}="
                f"{getattr(found, name)!r}), which it does not support. {advice}"
            )


def _name_of(member: Any) -> str | None:
    return member.name if isinstance(member, Enum) else member
