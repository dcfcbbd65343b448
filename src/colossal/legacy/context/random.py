"""A random generator for each parallel mode."""

from colossal._src.legacy.context import (
    add_seed,
    get_current_mode,
    get_seeds,
    get_states,
    reset_seeds,
    seed,
    set_mode,
    set_seed_states,
    sync_states,
    with_seed,
)
from colossal._src.legacy.moe import moe_set_seed

__all__ = [
    "add_seed",
    "get_current_mode",
    "get_seeds",
    "get_states",
    "moe_set_seed",
    "reset_seeds",
    "seed",
    "set_mode",
    "set_seed_states",
    "sync_states",
    "with_seed",
]
