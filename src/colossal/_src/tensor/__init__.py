"""How tensors are distributed over ranks: layouts, placements, plans, and conversions between them."""

import importlib
from typing import TYPE_CHECKING

from colossal._src.tensor.flat_layout import FlatLayout
from colossal._src.tensor.introspection import (
    comm_device,
    dtensor_placements,
    full_tensor_of,
    has_saved_tensor_hooks,
    is_dtensor,
    is_placed,
    layout_of,
    local_of,
    local_regions_of,
    placement_of,
)
from colossal._src.tensor.layout import Layout
from colossal._src.tensor.operators import (
    RunLocal,
    TensorOperators,
    operators_mesh,
    operators_of,
    set_operators,
    sharded_gradient,
)
from colossal._src.tensor.parallel_plan import (
    HeadCounts,
    ParallelPlan,
    Stages,
    base_model_of,
    find_modules,
    unwrap_adapters,
)
from colossal._src.tensor.parameters import (
    grad_of,
    move_module,
    parameter_names,
    set_data,
    set_grad,
    set_values,
    strip_compile_prefix,
    values_of,
    version_of,
)
from colossal._src.tensor.placement import (
    Placement,
    backing_shard,
    copy_placement,
    local_operations,
    set_backing_shard,
    set_placement,
)
from colossal._src.tensor.region import Region, RegionLayout
from colossal._src.tensor.relayout import relayout
from colossal._src.tensor.replaced import (
    carry_over_attributes,
    carry_over_hooks,
    hook_ids_of,
    keep_hooks,
    refuse_gradient_hooks,
    remove_hook,
)
from colossal._src.tensor.replicas import DATA, Replicas, broadcast_values, group_by_replicas, replicas_of
from colossal._src.tensor.shard import shard, unshard

if TYPE_CHECKING:
    from colossal._src.tensor.collected_outputs import COLLECTED, refuse_collected_outputs
    from colossal._src.tensor.expert_counts import log_experts
    from colossal._src.tensor.given_cache import refuse_given_cache
    from colossal._src.tensor.kv_cache import configs_with_cache, stop_caching
    from colossal._src.tensor.relayout_path import LayoutPath, greedy_path, plan_relayout
    from colossal._src.tensor.relayout_step import RelayoutStep, layout_difference, one_step_layouts

_MODULE_OF = {
    "COLLECTED": "colossal._src.tensor.collected_outputs",
    "LayoutPath": "colossal._src.tensor.relayout_path",
    "RelayoutStep": "colossal._src.tensor.relayout_step",
    "configs_with_cache": "colossal._src.tensor.kv_cache",
    "greedy_path": "colossal._src.tensor.relayout_path",
    "log_experts": "colossal._src.tensor.expert_counts",
    "layout_difference": "colossal._src.tensor.relayout_step",
    "one_step_layouts": "colossal._src.tensor.relayout_step",
    "plan_relayout": "colossal._src.tensor.relayout_path",
    "refuse_collected_outputs": "colossal._src.tensor.collected_outputs",
    "refuse_given_cache": "colossal._src.tensor.given_cache",
    "stop_caching": "colossal._src.tensor.kv_cache",
}  # which few programs need

__all__ = [
    "COLLECTED",
    "DATA",
    "FlatLayout",
    "HeadCounts",
    "Layout",
    "LayoutPath",
    "ParallelPlan",
    "Placement",
    "Region",
    "RegionLayout",
    "RelayoutStep",
    "Replicas",
    "RunLocal",
    "Stages",
    "TensorOperators",
    "backing_shard",
    "base_model_of",
    "broadcast_values",
    "carry_over_attributes",
    "carry_over_hooks",
    "comm_device",
    "configs_with_cache",
    "copy_placement",
    "dtensor_placements",
    "find_modules",
    "full_tensor_of",
    "grad_of",
    "greedy_path",
    "group_by_replicas",
    "has_saved_tensor_hooks",
    "hook_ids_of",
    "is_dtensor",
    "is_placed",
    "keep_hooks",
    "layout_difference",
    "layout_of",
    "local_of",
    "local_operations",
    "local_regions_of",
    "log_experts",
    "move_module",
    "one_step_layouts",
    "operators_mesh",
    "operators_of",
    "parameter_names",
    "placement_of",
    "plan_relayout",
    "refuse_collected_outputs",
    "refuse_given_cache",
    "refuse_gradient_hooks",
    "relayout",
    "remove_hook",
    "replicas_of",
    "set_backing_shard",
    "set_data",
    "set_grad",
    "set_operators",
    "set_placement",
    "set_values",
    "shard",
    "sharded_gradient",
    "stop_caching",
    "strip_compile_prefix",
    "unshard",
    "unwrap_adapters",
    "values_of",
    "version_of",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal._src.tensor' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
