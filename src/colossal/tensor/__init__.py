"""State at rest: how the parts of one tensor lie on the ranks that hold it."""

from colossal.tensor.boxes import BoxLayout
from colossal.tensor.convert import layout_of, local_of, meeting_device, parts_of, placements_of, shard_groups, whole_of
from colossal.tensor.flat import (
    FlatLayout,
    FlatShard,
    boxes_of,
    flat_shard_of,
    mark_like,
    mark_resting,
    mark_shard,
    resting_part,
    views_of,
    whole_shape,
)
from colossal.tensor.layout import Layout
from colossal.tensor.names import parameter_names
from colossal.tensor.part import TensorPart, mark_part, tensor_part_of
from colossal.tensor.path import LayoutPath, greedy_path, plan_relayout
from colossal.tensor.plan import HeadCounts, ParallelPlan, Stages, base_of, find_modules, without_adapters
from colossal.tensor.region import Region
from colossal.tensor.relayout import relayout
from colossal.tensor.shard import shard, unshard
from colossal.tensor.step import Step, difference, one_step

__all__ = [
    "BoxLayout",
    "FlatLayout",
    "FlatShard",
    "HeadCounts",
    "Layout",
    "LayoutPath",
    "ParallelPlan",
    "Region",
    "Stages",
    "Step",
    "TensorPart",
    "base_of",
    "boxes_of",
    "difference",
    "find_modules",
    "flat_shard_of",
    "greedy_path",
    "layout_of",
    "local_of",
    "mark_like",
    "mark_part",
    "mark_resting",
    "mark_shard",
    "meeting_device",
    "one_step",
    "parameter_names",
    "parts_of",
    "placements_of",
    "plan_relayout",
    "relayout",
    "resting_part",
    "shard",
    "shard_groups",
    "tensor_part_of",
    "unshard",
    "views_of",
    "whole_of",
    "whole_shape",
    "without_adapters",
]
