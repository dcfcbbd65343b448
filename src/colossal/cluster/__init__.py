"""The machine as a program sees it: processes, the mesh that they form, and how they are started."""

from colossal.cluster.axes import AXES, Axis
from colossal.cluster.coordinator import DistCoordinator
from colossal.cluster.grid import TENSOR_PARALLEL_MODES, TensorParallelMode, grid_of
from colossal.cluster.launch import (
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from colossal.cluster.link_cost import LINK_OPS, AxisCost, Link, LinkCost, LinkOp, LinkOrigin
from colossal.cluster.link_timing import measure_link_cost
from colossal.cluster.mesh import ParallelMesh, ambient_mesh, current_mesh

__all__ = [
    "AXES",
    "LINK_OPS",
    "TENSOR_PARALLEL_MODES",
    "Axis",
    "AxisCost",
    "DistCoordinator",
    "Link",
    "LinkCost",
    "LinkOp",
    "LinkOrigin",
    "ParallelMesh",
    "TensorParallelMode",
    "ambient_mesh",
    "current_mesh",
    "get_default_parser",
    "grid_of",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "measure_link_cost",
]
