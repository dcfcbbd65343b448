"""The machine as a program sees it: processes, the mesh that they form, and how they are started."""

from colossal._src.cluster import (
    TENSOR_PARALLEL_MODES,
    AxisCost,
    DistCoordinator,
    Link,
    LinkCost,
    ParallelMesh,
    current_mesh,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    make_tp_grid,
    measure_link_cost,
)

__all__ = [
    "TENSOR_PARALLEL_MODES",
    "AxisCost",
    "DistCoordinator",
    "Link",
    "LinkCost",
    "ParallelMesh",
    "current_mesh",
    "get_default_parser",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "make_tp_grid",
    "measure_link_cost",
]
