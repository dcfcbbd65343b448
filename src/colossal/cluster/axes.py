"""The axes of a mesh, outermost first.

Neighbours on the last axis are neighbours in rank, and so most likely share a host: tensor parallelism, which talks
most, comes last; pipeline stages, which talk least, come first.
"""

from typing import Literal, get_args

Axis = Literal["pp", "dp", "sp", "tp"]
"""Pipeline, data, sequence and tensor parallelism."""

AXES: tuple[Axis, ...] = get_args(Axis)
"""The names of all axes, outermost first."""
