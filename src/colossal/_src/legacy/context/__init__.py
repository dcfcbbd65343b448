"""Parallel modes, the groups of each, and a random generator for each."""

from colossal._src.legacy.context.own_groups import INITIALIZER_MAPPING, ProcessGroupInitializer
from colossal._src.legacy.context.parallel_context import ParallelContext, global_context
from colossal._src.legacy.context.parallel_mode import ParallelMode
from colossal._src.legacy.context.seeds import (
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
from colossal._src.legacy.context.singleton import SingletonMeta

__all__ = [
    "INITIALIZER_MAPPING",
    "ParallelContext",
    "ParallelMode",
    "ProcessGroupInitializer",
    "SingletonMeta",
    "add_seed",
    "get_current_mode",
    "get_seeds",
    "get_states",
    "global_context",
    "reset_seeds",
    "seed",
    "set_mode",
    "set_seed_states",
    "sync_states",
    "with_seed",
]
