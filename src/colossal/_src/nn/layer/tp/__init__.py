"""How layers are sharded along the tp axis, in each of its modes."""

from colossal._src.nn.layer.tp.linear_product import ColumnParallel, LinearProduct, RowParallel, Unsharded
from colossal._src.nn.layer.tp.parallel_layer import ParallelLayer, broadcast_rng_state, make_param_shard
from colossal._src.nn.layer.tp.sharding import (
    TP_SHARDINGS,
    TPSharding,
    find_mesh,
    local_length,
    make_layout,
    tp_sharding_of,
)
from colossal._src.nn.layer.tp.split_activation import gather_output, split_input

__all__ = [
    "TP_SHARDINGS",
    "ColumnParallel",
    "LinearProduct",
    "ParallelLayer",
    "RowParallel",
    "TPSharding",
    "Unsharded",
    "broadcast_rng_state",
    "find_mesh",
    "gather_output",
    "local_length",
    "make_layout",
    "make_param_shard",
    "split_input",
    "tp_sharding_of",
]
