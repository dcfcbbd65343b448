"""One function for many things, by a few threads."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(function: Callable[[T], R], items: Sequence[T], num_threads: int) -> list[R]:
    """Apply a function to each item.

    Threads of its own rather than an executor's, which refuses work once the program has begun to end: that is when the
    last asynchronous save is written.
    """
    results: list[R | None] = [None] * len(items)
    errors: list[Exception] = []
    numbers = iter(range(len(items)))  # the next of an iterator of a range is one step of the interpreter

    def work() -> None:
        for number in numbers:
            if errors:
                return
            try:
                results[number] = function(items[number])
            except Exception as error:  # noqa: BLE001 - raised by the calling thread
                errors.append(error)

    helpers = [threading.Thread(target=work) for _ in range(min(num_threads, len(items)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
