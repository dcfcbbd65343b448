# pyright: reportAttributeAccessIssue=false, reportMissingImports=false, reportCallIssue=false
"""The documented names of `colossal.testing`: each passes what it should, and fails what it should."""

import gc
import unittest
from collections import OrderedDict
from copy import deepcopy as copy_of

import pytest
import torch
from spawned import sum_ranks

import colossal
from colossal import testing
from colossal.errors import ConfigError
from colossal.testing import (
    DummyDataloader,
    assert_close,
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
    run_threads,
    skip_if_not_enough_gpus,
    spawn,
)

ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])


def test_the_names_are_found_in_their_older_modules() -> None:
    from colossal.testing.comparison import assert_equal as equal
    from colossal.testing.utils import spawn as start

    assert (equal, start) == (assert_equal, spawn)
    assert colossal.testing.free_port is testing.free_port


def test_tensors_are_compared() -> None:
    assert_equal(ONE, ONE.clone())
    assert_not_equal(ONE, TWO)
    assert_close_loose(ONE, ONE + 1e-4)
    assert_close(ONE, ONE.double(), check_dtype=False)
    with pytest.raises(AssertionError, match="All elements must be equal"):
        assert_equal(ONE, TWO)
    with pytest.raises(AssertionError, match="Some elements must differ"):
        assert_not_equal(ONE, ONE.clone())
    with pytest.raises(AssertionError, match="not close"):
        assert_close_loose(ONE, ONE + 0.1)
    with pytest.raises(AssertionError, match="not close"):
        assert_close_loose(ONE, ONE + 1e-4, rtol=1e-6, atol=0.0)


def compare_ranks() -> None:
    rank = torch.distributed.get_rank()
    assert_equal_in_group(torch.tensor([3.0]))
    with pytest.raises(AssertionError, match="All ranks must hold the same values"):
        assert_equal_in_group(torch.tensor([float(rank)]))


def test_ranks_are_compared() -> None:
    run_threads(compare_ranks, 2)


def test_outputs_are_compared() -> None:
    output = OrderedDict(loss=ONE, states=(ONE, [TWO, None]), name="x")
    same = OrderedDict(loss=ONE + 1e-7, states=(ONE, [TWO, None]), name="x")
    assert_hf_output_close(output, same)
    assert_hf_output_close(output, {**same, "loss": TWO}, ignore_keys=["loss"])
    for other, where in (
        ({**same, "loss": TWO}, "loss"),
        ({**same, "states": (ONE, [ONE, None])}, r"states\[1\]\[0\]"),
        ({**same, "states": (ONE, [TWO, 1])}, r"states\[1\]\[1\]"),
        ({**same, "states": (ONE,)}, "states"),
        ({**same, "more": 1}, "Both must be the same"),
        ({**same, "name": "y"}, "name"),
    ):
        with pytest.raises(AssertionError, match=where):
            assert_hf_output_close(output, other)


def test_state_dicts_are_compared() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    copy = torch.nn.Linear(2, 2)
    with pytest.raises(AssertionError):
        check_state_dict_equal(model.state_dict(), copy.state_dict())
    copy.load_state_dict(model.state_dict())
    check_state_dict_equal(model.state_dict(), copy.state_dict())
    state = copy_of(optimizer.state_dict())
    check_state_dict_equal(state, optimizer.state_dict())
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] + 1e-6
    with pytest.raises(AssertionError, match="All elements must be equal"):
        check_state_dict_equal(state, optimizer.state_dict())
    with pytest.raises(AssertionError, match="Both must be the same at w"):
        check_state_dict_equal({"w": ONE}, {"w": ONE.double()})
    check_state_dict_equal({"w": ONE}, {"w": ONE.double() + 1e-5}, ignore_dtype=True)
    with pytest.raises(AssertionError, match="Both must be the same at w"):
        check_state_dict_equal({"w": ONE}, {"w": ONE.to("meta")}, ignore_device=False)


def test_a_function_is_called_for_each_combination() -> None:
    calls = []

    @parameterize("first", [1, 2])
    @parameterize("second", ["a", "b"])
    def record(prefix: str, first: int, second: str) -> None:
        calls.append((prefix, first, second))

    record("x")
    assert calls == [("x", 1, "a"), ("x", 1, "b"), ("x", 2, "a"), ("x", 2, "b")]


def failing(error: Exception, times: int) -> tuple[list[int], object]:
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    return calls, call


def test_a_function_is_called_again_after_an_exception() -> None:
    in_use = RuntimeError("server socket: Address already in use")
    for decorator, error, times, num_calls in (
        (rerun_on_exception(ValueError, max_try=3), ValueError("x"), 2, 3),
        (rerun_on_exception(ValueError, pattern="^n", max_try=None), ValueError("no"), 7, 8),
        (rerun_if_address_is_in_use(), in_use, 1, 2),
    ):
        calls, call = failing(error, times)
        assert decorator(call)() == "done"
        assert len(calls) == num_calls
    for decorator, error, num_calls in (
        (rerun_on_exception(ValueError, max_try=3), ValueError("x"), 3),
        (rerun_on_exception(ValueError, pattern="in use"), ValueError("x"), 1),
        (rerun_on_exception(OSError), ValueError("x"), 1),
        (rerun_if_address_is_in_use(), RuntimeError("x"), 1),
        (rerun_if_address_is_in_use(), in_use, 5),
    ):
        calls, call = failing(error, 100)
        with pytest.raises(type(error), match=str(error)):
            decorator(call)()
        assert len(calls) == num_calls
    with pytest.raises(ConfigError, match="A function is called at least once"):
        rerun_on_exception(max_try=0)


def test_tests_are_skipped_where_they_say(monkeypatch) -> None:
    def run() -> str:
        return "done"

    assert skip_if_not_enough_gpus(0)(run)() == "done"
    with pytest.raises(unittest.SkipTest, match="needs 99 accelerators"):
        skip_if_not_enough_gpus(99)(run)()
    monkeypatch.delenv("SOME_FLAG", raising=False)
    with pytest.raises(unittest.SkipTest, match="SOME_FLAG is not 1"):
        run_on_environment_flag("some_flag")(run)()
    monkeypatch.setenv("SOME_FLAG", "1")
    assert run_on_environment_flag("some_flag")(run)() == "done"


def test_unused_memory_is_released_before_a_test() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.itself = self
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    gc.disable()
    try:
        Node()
        assert Node.alive == 1
        assert clear_cache_before_run()(lambda: Node.alive)() == 0
    finally:
        gc.enable()


def test_a_loader_makes_its_batches() -> None:
    numbers = iter(range(100))
    loader = DummyDataloader(lambda: next(numbers), length=3)
    assert (len(loader), list(loader), list(loader)) == (3, [0, 1, 2], [3, 4, 5])


@pytest.mark.slow
@rerun_if_address_is_in_use()
def test_processes_are_started() -> None:
    spawn(sum_ranks, 2, offset=1)


@pytest.mark.slow
def test_a_failure_in_a_process_is_reported() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="too much"):
        spawn(sum_ranks, 1, offset=2)


def test_a_free_port_can_be_bound() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("", free_port()))
