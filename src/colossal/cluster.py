"""Start processes, and arrange them in a mesh of named axes."""

from colossal._src.cluster import (
    TENSOR_PARALLEL_MODES,
    AxisCost,
    Config,
    DistCoordinator,
    Link,
    LinkCost,
    LinkOrigin,
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
    "Config",
    "DistCoordinator",
    "Link",
    "LinkCost",
    "LinkOrigin",
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
