"""State at rest: how the parts of one tensor lie on the ranks that hold it."""

from colossal.tensor.convert import layout_of, local_of, shard_groups, whole_of
from colossal.tensor.layout import Layout, Region

__all__ = ["Layout", "Region", "layout_of", "local_of", "shard_groups", "whole_of"]
