"""Calls into torch that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def call_within(seconds: float, function: Callable[[], _T]) -> _T:
    """Return what a function returns, or raise what it raises.

    A function that takes too long is left alone: nothing can interrupt a thread that waits inside of torch. Being a
    daemon, it does not keep the program from ending.
    """
    outcome: Future[_T] = Future()
    threading.Thread(target=_run, args=(function, outcome), name="colossal-launch", daemon=True).start()
    try:
        return outcome.result(seconds)
    finally:
        del outcome  # an error knows this frame, and would be part of a cycle that keeps a port open


def _run(function: Callable[[], _T], outcome: "Future[_T]") -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
        outcome.set_exception(error)
    finally:
        del outcome
