"""How layers lie on the tp axis, in each of its modes."""

from colossal.nn.layer.grid.arrangement import ARRANGEMENTS, Arrangement, arrangement_of, find_mesh, lay
from colossal.nn.layer.grid.cut import gather_output, split_input
from colossal.nn.layer.grid.layer import ParallelLayer

__all__ = [
    "ARRANGEMENTS",
    "Arrangement",
    "ParallelLayer",
    "arrangement_of",
    "find_mesh",
    "gather_output",
    "lay",
    "split_input",
]
