"""What older programs ask of the parameters of experts: over which ranks they are."""

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis, ParallelMesh, current_mesh
from colossal._src.tensor import placement_of
from colossal.errors import ConfigError


def is_moe_tensor(tensor: torch.Tensor) -> bool:
    """Return whether ranks of the ep axis of the mesh in force have different rows of a parameter."""
    mesh, layout = current_mesh() if dist.is_initialized() else None, placement_of(tensor).layout
    return mesh is not None and mesh.size("ep") > 1 and any(layout.dims) and {*layout.ranks} == {*mesh.ranks("ep")}


def get_ep_group(tensor: torch.Tensor) -> dist.ProcessGroup:
    """Return the ranks that have different experts than this one."""
    return _mesh_of(tensor).group("ep")


def get_ep_size(tensor: torch.Tensor) -> int:
    """Return how many they are."""
    return _mesh_of(tensor).size("ep")


def get_ep_rank(tensor: torch.Tensor) -> int:
    """Return the index of this rank among them."""
    return _mesh_of(tensor).rank("ep")


def get_ep_group_ranks(tensor: torch.Tensor) -> list[int]:
    """Return their numbers."""
    return _ranks(tensor, "ep")


def get_dp_group(tensor: torch.Tensor) -> dist.ProcessGroup:
    """Return the ranks that have the same experts as this one."""
    return _mesh_of(tensor).group("edp")


def get_dp_size(tensor: torch.Tensor) -> int:
    """Return how many they are."""
    return _mesh_of(tensor).size("edp")


def get_dp_rank(tensor: torch.Tensor) -> int:
    """Return the index of this rank among them."""
    return _mesh_of(tensor).rank("edp")


def get_dp_group_ranks(tensor: torch.Tensor) -> list[int]:
    """Return their numbers."""
    return _ranks(tensor, "edp")


def _ranks(tensor: torch.Tensor, axis: Axis) -> list[int]:
    return [*_mesh_of(tensor).ranks(axis)]


def _mesh_of(tensor: torch.Tensor) -> ParallelMesh:
    if not is_moe_tensor(tensor):
        raise ConfigError(
            "Ranks of ep have different rows of the parameters of experts. Found a tensor of the shape "
            f"{tuple(tensor.shape)}, which is none of these on the mesh in force. Ask is_moe_tensor before, inside "
            "`with mesh:`."
        )
    return current_mesh()
