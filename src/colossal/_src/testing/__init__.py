"""For tests and tutorials: process groups, comparisons with one process, small inputs, counters and figures."""

from colossal._src.cluster import fake_world
from colossal._src.testing.asserts import (
    TOLERANCES,
    Tolerance,
    assert_close,
    assert_equal_to_one_process,
    assert_same_on_all_ranks,
)
from colossal._src.testing.expected_error import expect_error
from colossal._src.testing.figures import COLORS, draw_figure
from colossal._src.testing.finetuning_inputs import make_finetuning_inputs
from colossal._src.testing.processes import WorldError, reuse_processes, run_processes
from colossal._src.testing.saved_tensor_counter import SavedTensorCounter
from colossal._src.testing.storages import find_storages
from colossal._src.testing.worlds import run_threads

__all__ = [
    "COLORS",
    "TOLERANCES",
    "SavedTensorCounter",
    "Tolerance",
    "WorldError",
    "assert_close",
    "assert_equal_to_one_process",
    "assert_same_on_all_ranks",
    "draw_figure",
    "expect_error",
    "fake_world",
    "find_storages",
    "make_finetuning_inputs",
    "reuse_processes",
    "run_processes",
    "run_threads",
]
