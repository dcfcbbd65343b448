"""What tests of programs of the older API import: comparisons, processes, and what repeats and skips tests."""

from colossal._src.testing.older import (
    DummyDataloader,
    assert_close_loose,
    assert_equal,
    assert_equal_in_group,
    assert_hf_output_close,
    assert_not_equal,
    check_state_dict_equal,
    clear_cache_before_run,
    free_port,
    parameterize,
    rerun_if_address_is_in_use,
    rerun_on_exception,
    run_on_environment_flag,
    skip_if_not_enough_gpus,
    spawn,
)

__all__ = [
    "DummyDataloader",
    "assert_close_loose",
    "assert_equal",
    "assert_equal_in_group",
    "assert_hf_output_close",
    "assert_not_equal",
    "check_state_dict_equal",
    "clear_cache_before_run",
    "free_port",
    "parameterize",
    "rerun_if_address_is_in_use",
    "rerun_on_exception",
    "run_on_environment_flag",
    "skip_if_not_enough_gpus",
    "spawn",
]
