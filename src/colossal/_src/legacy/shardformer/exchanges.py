"""Collectives with their gradients over a process group, by their older names: those of `colossal.comm`."""

import torch
from torch import distributed as dist

from colossal._src import comm
from colossal._src.legacy.shardformer.group_layer import mesh_of
from colossal.errors import UnsupportedError

Group = dist.ProcessGroup | None


def gather_forward_split_backward(
    input_: torch.Tensor,
    dim: int,
    process_group: Group,
    grad_scale: str | None = None,
    fp8_communication: bool = False,
) -> torch.Tensor:
    """Join shards; `colossal.comm.gather`."""
    _refuse(fp8_communication)
    mesh = mesh_of(process_group)
    return comm.gather(_scale_grad(input_, grad_scale, mesh.size("tp")), "tp", dim, mesh)


def split_forward_gather_backward(
    input_: torch.Tensor,
    dim: int,
    process_group: Group,
    grad_scale: str | None = None,
    fp8_communication: bool = False,
) -> torch.Tensor:
    """Keep a shard; `colossal.comm.scatter`."""
    _refuse(fp8_communication)
    mesh = mesh_of(process_group)
    return comm.scatter(_scale_grad(input_, grad_scale, mesh.size("tp")), "tp", dim, mesh)


def reduce_forward(input_: torch.Tensor, process_group: Group, fp8_communication: bool = False) -> torch.Tensor:
    """Add up what ranks have; `colossal.comm.reduce`."""
    _refuse(fp8_communication)
    return comm.reduce(input_, "tp", mesh_of(process_group))


def reduce_backward(input_: torch.Tensor, process_group: Group, fp8_communication: bool = False) -> torch.Tensor:
    """Add up the gradients that ranks have; `colossal.comm.replicate`."""
    _refuse(fp8_communication)
    return comm.replicate(input_, "tp", mesh_of(process_group))


def gather_forward_reducescatter_backward(
    input_: torch.Tensor, process_group: Group, dim: int, fp8_communication: bool = False
) -> torch.Tensor:
    """Join shards that ranks use for different things; `colossal.comm.gather`."""
    _refuse(fp8_communication)
    return comm.gather(input_, "tp", dim, mesh_of(process_group), partial_grad=True)


def reducescatter_forward_gather_backward(
    input_: torch.Tensor, process_group: Group, dim: int, fp8_communication: bool = False
) -> torch.Tensor:
    """Add up what ranks have, and keep a shard; `colossal.comm.reduce_scatter`."""
    _refuse(fp8_communication)
    return comm.reduce_scatter(input_, "tp", dim, mesh_of(process_group))


def _scale_grad(tensor: torch.Tensor, scale: str | None, size: int) -> torch.Tensor:
    """Multiply or divide a gradient by the number of ranks."""
    if scale is None or not tensor.requires_grad:
        return tensor
    scaled = tensor.view_as(tensor)
    scaled.register_hook(lambda grad: grad * size if scale == "up" else grad / size)
    return scaled


def _refuse(fp8_communication: bool) -> None:
    if fp8_communication:
        raise UnsupportedError(
            "Activations are sent in their dtype. Found fp8_communication=True. Leave it out, or pass it to a plugin, "
            "which then reduces gradients in 8 bits."
        )
