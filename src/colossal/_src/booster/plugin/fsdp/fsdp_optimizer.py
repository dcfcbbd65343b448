"""An optimizer that the user built for full parameters, updating shards."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossal._src.interface import check_optimizer
from colossal.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_on_dtensors(optimizer: Optimizer, scalars: set[nn.Parameter], mesh: "DeviceMesh") -> None:
    """Refuse optimizers that are wrong on DTensors."""
    from torch.distributed.tensor import DTensor, Shard

    def as_dtensor(local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim, run_check=False)

    _check_fused(optimizer)
    check_optimizer(optimizer, shards=True, as_parameter=as_dtensor)
    for group in optimizer.param_groups:
        fast = next((name for name in ("fused", "foreach") if group.get(name)), None)
        if fast and scalars & set(group["params"]) and not scalars >= set(group["params"]):
            raise UnsupportedError(
                f"Parameters without dimensions stay unsharded next to sharded ones. Found both in a group with {fast}="
                f"True, which updates all at once. Give them a group of their own, or leave {fast} out."
            )
    for parameter, name, value in _tensors_in_state(optimizer):
        if value.numel() != 1 and value.shape != parameter.shape:
            raise UnsupportedError(
                "State that an optimizer holds before boost is sharded like its parameter. Found "
                f"{name!r} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}. "
                "Boost a new optimizer."
            )


def _check_fused(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Adam) and any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedError(
            "The fused kernels of torch.optim.Adam and AdamW support shards. Found fused=True in "
            f"{type(optimizer).__name__}, whose kernel does not. Leave fused out, or pass foreach=True."
        )


def state_by_name(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, torch.Tensor]:
    """Name the tensors of an optimizer's state."""
    return {f"{name} of {names[parameter]}": value for parameter, name, value in _tensors_in_state(optimizer)}


def disable_foreach_for_mixed_groups(optimizer: Optimizer) -> None:
    """Keep unsharded and sharded parameters of a group from going to one kernel, as torch does by default."""
    for group in optimizer.param_groups:
        kinds = {type(parameter.data) for parameter in group["params"] if parameter.requires_grad}
        if len(kinds) > 1 and group.get("foreach", False) is None:
            group["foreach"] = False


def shard_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Shard a full tensor, which every rank has, with the placements of a parameter."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    shard = parameter.data
    if not isinstance(shard, DTensor):
        return value
    there = value.to(shard.device_mesh.device_type)
    # every rank has the full tensor: with a source rank, each call would communicate
    sharded = distribute_tensor(there, shard.device_mesh, shard.placements, src_data_rank=None)
    # with offloading the shard is in host memory, while its mesh is one of devices
    return sharded.to(shard.device)


def _tensors_in_state(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, str, torch.Tensor]]:
    state: Any = optimizer.state  # keyed by parameters, whatever torch declares
    for parameter, entries in state.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                yield parameter, name, value
