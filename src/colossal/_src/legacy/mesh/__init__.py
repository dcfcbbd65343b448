"""Grids of ranks by the names of the older API."""

from colossal._src.legacy.mesh.alpha_beta import AlphaBetaProfiler
from colossal._src.legacy.mesh.device_mesh import DeviceMesh
from colossal._src.legacy.mesh.device_mesh_manager import DeviceMeshInfo, DeviceMeshManager
from colossal._src.legacy.mesh.priority import priority_execution
from colossal._src.legacy.mesh.process_group_mesh import ProcessGroupManager, ProcessGroupMesh
from colossal._src.legacy.mesh.rank_grid import RankGrid, form_further_group, form_group, grid_of_group

__all__ = [
    "AlphaBetaProfiler",
    "DeviceMesh",
    "DeviceMeshInfo",
    "DeviceMeshManager",
    "ProcessGroupManager",
    "ProcessGroupMesh",
    "RankGrid",
    "form_further_group",
    "form_group",
    "grid_of_group",
    "priority_execution",
]
