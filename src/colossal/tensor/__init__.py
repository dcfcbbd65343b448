"""How tensors are distributed over ranks: layouts, placements, plans, and conversions between them."""

from colossal.tensor.boxes import BoxLayout
from colossal.tensor.convert import (
    is_dtensor,
    layout_of,
    local_of,
    meeting_device,
    parts_of,
    placement_of,
    placements_of,
    whole_of,
)
from colossal.tensor.flat import FlatLayout
from colossal.tensor.layout import Layout
from colossal.tensor.names import parameter_names, without_compile
from colossal.tensor.path import LayoutPath, greedy_path, plan_relayout
from colossal.tensor.placement import Placement, copy_placement, mark_resting, resting_part, set_placement
from colossal.tensor.plan import HeadCounts, ParallelPlan, Stages, base_of, find_modules, without_adapters
from colossal.tensor.region import Region
from colossal.tensor.relayout import relayout
from colossal.tensor.shard import shard, unshard
from colossal.tensor.step import Step, difference, one_step
from colossal.tensor.values import move_module, set_data

__all__ = [
    "BoxLayout",
    "FlatLayout",
    "HeadCounts",
    "Layout",
    "LayoutPath",
    "ParallelPlan",
    "Placement",
    "Region",
    "Stages",
    "Step",
    "base_of",
    "copy_placement",
    "difference",
    "find_modules",
    "greedy_path",
    "is_dtensor",
    "layout_of",
    "local_of",
    "mark_resting",
    "meeting_device",
    "move_module",
    "one_step",
    "parameter_names",
    "parts_of",
    "placement_of",
    "placements_of",
    "plan_relayout",
    "relayout",
    "resting_part",
    "set_data",
    "set_placement",
    "shard",
    "unshard",
    "whole_of",
    "without_adapters",
    "without_compile",
]
