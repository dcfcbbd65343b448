"""The machine as a program sees it: processes, the mesh that they form, and how they are started."""

import importlib
from typing import TYPE_CHECKING

from colossal._src.cluster.axes import AXES, Axis
from colossal._src.cluster.backends import group_for, host_group
from colossal._src.cluster.config import Config, current_config, read_config, set_current_config
from colossal._src.cluster.config_mesh import OWN_MODES, form_own_mode, form_own_modes_by, mesh_options
from colossal._src.cluster.coordinator import DistCoordinator
from colossal._src.cluster.launch import (
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from colossal._src.cluster.mesh import ParallelMesh, ambient_mesh, current_mesh
from colossal._src.cluster.tp_grid import TENSOR_PARALLEL_MODES, TensorParallelMode, make_tp_grid

if TYPE_CHECKING:
    from colossal._src.cluster.fake import fake_world, serve_accelerator
    from colossal._src.cluster.link_cost import (
        ENVIRONMENT_VARIABLE,
        LINK_OPS,
        AxisCost,
        Link,
        LinkCost,
        LinkOp,
        LinkOrigin,
        collective_cost_factors,
        link_cost_from_environment,
    )
    from colossal._src.cluster.link_timing import measure_link_cost

from colossal._src.cluster.context_var import InheritedContextVar
from colossal._src.cluster.mesh import set_ambient_mesh
from colossal._src.cluster.rendezvous import WorldSpec, form_world, wait_for_all
from colossal._src.cluster.timeouts import call_within

__all__ = [
    "AXES",
    "ENVIRONMENT_VARIABLE",
    "LINK_OPS",
    "OWN_MODES",
    "TENSOR_PARALLEL_MODES",
    "Axis",
    "AxisCost",
    "Config",
    "DistCoordinator",
    "InheritedContextVar",
    "Link",
    "LinkCost",
    "LinkOp",
    "LinkOrigin",
    "ParallelMesh",
    "TensorParallelMode",
    "WorldSpec",
    "ambient_mesh",
    "call_within",
    "collective_cost_factors",
    "current_config",
    "current_mesh",
    "fake_world",
    "form_own_mode",
    "form_own_modes_by",
    "form_world",
    "get_default_parser",
    "group_for",
    "host_group",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "link_cost_from_environment",
    "make_tp_grid",
    "measure_link_cost",
    "mesh_options",
    "read_config",
    "serve_accelerator",
    "set_ambient_mesh",
    "set_current_config",
    "wait_for_all",
]


_MODULE_OF = {
    "AxisCost": "colossal._src.cluster.link_cost",
    "ENVIRONMENT_VARIABLE": "colossal._src.cluster.link_cost",
    "LINK_OPS": "colossal._src.cluster.link_cost",
    "Link": "colossal._src.cluster.link_cost",
    "LinkCost": "colossal._src.cluster.link_cost",
    "LinkOp": "colossal._src.cluster.link_cost",
    "LinkOrigin": "colossal._src.cluster.link_cost",
    "collective_cost_factors": "colossal._src.cluster.link_cost",
    "fake_world": "colossal._src.cluster.fake",
    "link_cost_from_environment": "colossal._src.cluster.link_cost",
    "measure_link_cost": "colossal._src.cluster.link_timing",
    "serve_accelerator": "colossal._src.cluster.fake",
}  # which few programs need


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal._src.cluster' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
