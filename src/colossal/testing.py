"""For tests and tutorials: process groups, comparisons with one process, small inputs, counters and figures."""

from colossal._src.testing import (
    COLORS,
    TOLERANCES,
    SavedTensorCounter,
    Tolerance,
    WorldError,
    assert_close,
    assert_equal_to_one_process,
    assert_same_on_all_ranks,
    draw_figure,
    expect_error,
    fake_world,
    find_storages,
    make_finetuning_inputs,
    reuse_processes,
    run_processes,
    run_threads,
)

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
