"""How layers are sharded along the tp axis, in each of its modes."""

from colossal._src.nn.layer.tp.parallel_layer import ParallelLayer
from colossal._src.nn.layer.tp.sharding import TP_SHARDINGS, TPSharding, find_mesh, make_layout, tp_sharding_of
from colossal._src.nn.layer.tp.split_activation import gather_output, split_input

__all__ = [
    "TP_SHARDINGS",
    "ParallelLayer",
    "TPSharding",
    "find_mesh",
    "gather_output",
    "make_layout",
    "split_input",
    "tp_sharding_of",
]
