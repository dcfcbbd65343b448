"""The axes of a mesh, outermost first.

Neighbours on the last axis are neighbours in rank, and so most likely share a host: tensor parallelism, which talks
most, comes last; pipeline stages, which talk least, come first. The tp axis may itself be a grid, see
`colossal.cluster.tp_grid`.
"""

from typing import Literal, get_args

MeshAxis = Literal["pp", "dp", "sp", "tp"]
"""Pipeline, data, sequence and tensor parallelism."""

GridAxis = Literal["depth", "row", "col", "weight", "input", "output"]
"""Views of the tp axis: of 2D and 2.5D grids, and by what travels along them, of 3D ones."""

Axis = MeshAxis | GridAxis
"""What a collective runs along."""

AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)
"""The names of the axes of every mesh, outermost first."""
