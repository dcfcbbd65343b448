"""Parallel modes, and the mesh and the config of a program as `global_context` has them."""

from colossal._src.legacy.context import (
    INITIALIZER_MAPPING,
    ParallelContext,
    ParallelMode,
    ProcessGroupInitializer,
    SingletonMeta,
    global_context,
)
from colossal.legacy.context import random as random

__all__ = [
    "INITIALIZER_MAPPING",
    "ParallelContext",
    "ParallelMode",
    "ProcessGroupInitializer",
    "SingletonMeta",
    "global_context",
]
