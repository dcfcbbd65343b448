"""The axes of a mesh, outermost first.

Adjacent indices on the last axis are adjacent global ranks, which are most likely on the same host. So tensor
parallelism, which communicates most, comes last, and pipeline parallelism, which communicates least, comes first. The
tp axis may itself be a grid, see `tp_grid.py`. Experts are sharded over ranks of all axes but pp: blocks of ``ep``
consecutive ranks of a stage hold all of them, and ranks with the same place in these blocks hold the same ones.
"""

from typing import Literal, get_args

MeshAxis = Literal["pp", "dp", "sp", "tp"]
"""Pipeline, data, sequence and tensor parallelism."""

GridAxis = Literal["depth", "row", "col", "weight", "input", "output"]
"""Views of the tp axis: of 2D and 2.5D grids, and by what travels along them, of 3D ones."""

ExpertAxis = Literal["ep", "edp"]
"""Views of the dp, sp and tp axes of one stage together: ranks of different experts, and those of the same ones."""

Axis = MeshAxis | GridAxis | ExpertAxis
"""What a collective runs along."""

AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)
"""The names of the axes of every mesh, outermost first."""
