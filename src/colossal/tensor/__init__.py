"""State at rest: how the parts of one tensor lie on the ranks that hold it."""

from colossal.tensor.convert import layout_of, local_of, placements_of, shard_groups, whole_of
from colossal.tensor.layout import Layout
from colossal.tensor.path import LayoutPath, greedy_path, plan_relayout
from colossal.tensor.region import Region
from colossal.tensor.relayout import relayout
from colossal.tensor.shard import shard, unshard
from colossal.tensor.step import Step, difference, one_step

__all__ = [
    "Layout",
    "LayoutPath",
    "Region",
    "Step",
    "difference",
    "greedy_path",
    "layout_of",
    "local_of",
    "one_step",
    "placements_of",
    "plan_relayout",
    "relayout",
    "shard",
    "shard_groups",
    "unshard",
    "whole_of",
]
