"""Worlds of several ranks for tests, and comparisons that know their tolerance."""

from colossal._src.testing.asserts import TOLERANCES, Tolerance, assert_close, assert_same_on_all_ranks
from colossal._src.testing.processes import WorldError, reuse_processes, run_processes
from colossal._src.testing.worlds import fake_world, run_threads

__all__ = [
    "TOLERANCES",
    "Tolerance",
    "WorldError",
    "assert_close",
    "assert_same_on_all_ranks",
    "fake_world",
    "reuse_processes",
    "run_processes",
    "run_threads",
]
