"""Meshes of devices, by names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from colossal._src.legacy.mesh.alpha_beta import AlphaBetaProfiler
from colossal._src.legacy.mesh.device_mesh import DeviceMesh
from colossal.errors import MeshError


@final
@dataclass(frozen=True)
class DeviceMeshInfo:
    """What a mesh is made from.

    Args:
        physical_ids: The global ranks.
        mesh_shape: The shape of the grid; by default the one that suits the measured links.

    Raises:
        MeshError: The shape has another number of ranks.

    Example:
        >>> from colossal.legacy.cluster import DeviceMeshInfo
        >>> DeviceMeshInfo([0, 1, 2, 3], (2, 2)).mesh_shape
        (2, 2)
    """

    physical_ids: Sequence[int]
    mesh_shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.mesh_shape is not None and torch.Size(self.mesh_shape).numel() != len(self.physical_ids):
            raise MeshError(
                f"A mesh of {tuple(self.mesh_shape)} has as many ranks. Found {list(self.physical_ids)}. Change the "
                "shape."
            )


@final
class DeviceMeshManager:
    """Keeps meshes of devices by names.

    Superseded by `colossal.cluster.ParallelMesh`.

    Attributes:
        device_mesh_store: The meshes by name.

    Example:
        >>> from colossal.legacy.cluster import DeviceMeshInfo, DeviceMeshManager
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     DeviceMeshManager().create_device_mesh("all", DeviceMeshInfo([0, 1, 2, 3], (2, 2)))
        DeviceMesh([[0, 1], [2, 3]])
    """

    def __init__(self) -> None:
        self.device_mesh_store: dict[str, DeviceMesh] = {}

    def create_device_mesh(self, name: str, device_mesh_info: DeviceMeshInfo) -> DeviceMesh:
        """Make a mesh.

        Args:
            name: Its name.
            device_mesh_info: The ranks, and the shape.

        Returns:
            The mesh; with costs of its axes if its shape was found by measuring.

        Raises:
            MeshError: The name is taken, or without a shape this rank is none of several ranks.

        Communication: without a shape, that of `AlphaBetaProfiler`; all of these ranks must call.
        """
        if name in self.device_mesh_store:
            raise MeshError(
                f"A mesh has a name of its own. Found {name!r} among {list(self.device_mesh_store)}. Change the name."
            )
        ranks = torch.tensor(list(device_mesh_info.physical_ids), device="cpu")
        if device_mesh_info.mesh_shape is not None:
            mesh = DeviceMesh(ranks, device_mesh_info.mesh_shape)
        else:
            profiler = AlphaBetaProfiler(device_mesh_info.physical_ids)
            grid = torch.tensor(profiler.search_best_logical_mesh(), device="cpu")
            alphas, betas = profiler.extract_alpha_beta_for_device_mesh()
            mesh = DeviceMesh(ranks, logical_mesh_id=grid, mesh_alpha=alphas, mesh_beta=betas)
        self.device_mesh_store[name] = mesh
        return mesh

    def get(self, name: str) -> DeviceMesh:
        """Return the mesh with a name.

        Args:
            name: Its name.

        Returns:
            The mesh.

        Raises:
            MeshError: There is none.
        """
        if name not in self.device_mesh_store:
            raise MeshError(f"The meshes are {list(self.device_mesh_store)}. Found {name!r}. Create it first.")
        return self.device_mesh_store[name]

    def destroy(self, name: str) -> None:
        """Forget a mesh; groups that it formed stay until the processes end.

        Args:
            name: Its name.

        Raises:
            MeshError: There is none.
        """
        self.get(name)
        del self.device_mesh_store[name]

    def destroy_all(self) -> None:
        """Forget all meshes."""
        self.device_mesh_store.clear()
