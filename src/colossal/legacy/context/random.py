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

__all__ = [
    "add_seed",
    "get_current_mode",
    "get_seeds",
    "get_states",
    "reset_seeds",
    "seed",
    "set_mode",
    "set_seed_states",
    "sync_states",
    "with_seed",
]
