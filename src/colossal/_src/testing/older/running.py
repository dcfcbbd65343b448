"""What starts, repeats, skips and feeds tests, by the names of the older documentation."""

import gc
import os
import re
import socket
import unittest
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, final

from torch import multiprocessing

from colossal._src.legacy import superseded
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger

_P = ParamSpec("_P")
_T = TypeVar("_T")


def spawn(func: Callable[..., Any], nprocs: int = 1, **kwargs: Any) -> None:
    """Run a function in new processes, which can find each other.

    Superseded by `colossal.testing.run_processes`, which starts faster, forms the process group and returns results.

    Args:
        func: Called as ``func(rank, world_size=..., port=..., **kwargs)``; a function of a module.
        nprocs: Number of processes.
        **kwargs: Passed to the function.

    Raises:
        Exception: The function raised in a process: `torch.multiprocessing.ProcessRaisedException`, whose message has
            the traceback.

    Example:
        >>> from colossal.legacy.testing import spawn
        >>> def check(rank, world_size, port):
        ...     assert rank < world_size
        >>> spawn(check, nprocs=2)  # doctest: +SKIP
    """
    superseded("colossal.testing.spawn", "colossal.testing.run_processes(function, size)")
    target = partial(func, world_size=nprocs, port=free_port(), **kwargs)
    multiprocessing.spawn(target, nprocs=nprocs)


def free_port() -> int:
    """Find a TCP port of this host that is free at the moment.

    Returns:
        Its number.

    Example:
        >>> from colossal.legacy.testing import free_port
        >>> 1024 <= free_port() < 65536
        True
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", 0))
        return listener.getsockname()[1]


def parameterize(argument: str, values: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Call a function once for each value of one of its arguments, in one test.

    Args:
        argument: The name of the argument.
        values: Its values.

    Returns:
        A decorator; several of them make all combinations.

    Example:
        >>> from colossal.legacy.testing import parameterize
        >>> @parameterize("size", [1, 2])
        ... def show(size):
        ...     print(size)
        >>> show()
        1
        2
    """
    fixed = list(values)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        # not `wraps`: pytest would look for a fixture that is called like the argument
        def call(*args: Any, **kwargs: Any) -> None:
            for value in fixed:
                function(*args, **{argument: value}, **kwargs)

        call.__name__, call.__doc__, call.__module__ = function.__name__, function.__doc__, function.__module__
        return call

    return decorate


def rerun_on_exception(
    exception_type: type[BaseException] = Exception, pattern: str | None = None, max_try: int | None = 5
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Call a function again where it raises an exception that comes and goes.

    Args:
        exception_type: The exception.
        pattern: A regular expression that its message contains; any message by default.
        max_try: How often the function is called at most; None for no limit.

    Returns:
        A decorator.

    Raises:
        ConfigError: `max_try` is below 1.

    Example:
        >>> from colossal.legacy.testing import rerun_on_exception
        >>> calls = []
        >>> @rerun_on_exception(OSError, pattern="in use")
        ... def connect():
        ...     calls.append("call")
        ...     if len(calls) < 3:
        ...         raise OSError("Address already in use")
        >>> connect()
        >>> len(calls)
        3
    """
    if max_try is not None and max_try < 1:
        raise ConfigError(f"A function is called at least once. Found max_try={max_try}. Pass 1 or more, or None.")

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            num_calls = 0
            while True:
                num_calls += 1
                try:
                    return function(*args, **kwargs)
                except exception_type as error:
                    is_expected = pattern is None or re.search(pattern, str(error)) is not None
                    if not is_expected or num_calls == max_try:
                        raise
                    get_dist_logger().warning(f"{function.__name__} is called again after {type(error).__name__}")

        return call

    return decorate


def rerun_if_address_is_in_use() -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Call a test that starts processes again where another program has taken their port meanwhile.

    Returns:
        A decorator.

    Example:
        >>> from colossal.legacy.testing import rerun_if_address_is_in_use
        >>> @rerun_if_address_is_in_use()
        ... def run():
        ...     return "done"
        >>> run()
        'done'
    """
    return rerun_on_exception(Exception, pattern="(?i)address already in use|EADDRINUSE")


def skip_if_not_enough_gpus(min_gpus: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Skip a test where this host has too few accelerators.

    Args:
        min_gpus: Their number.

    Returns:
        A decorator. The test raises `unittest.SkipTest` where there are fewer, which test runners report.

    Example:
        >>> from colossal.legacy.testing import skip_if_not_enough_gpus
        >>> @skip_if_not_enough_gpus(0)
        ... def run():
        ...     return "done"
        >>> run()
        'done'
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            accelerator = get_accelerator()
            found = 0 if accelerator.is_cpu else accelerator.device_count()
            if found < min_gpus:
                raise unittest.SkipTest(f"needs {min_gpus} accelerators, found {found}")
            return function(*args, **kwargs)

        return call

    return decorate


def clear_cache_before_run() -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Release unused memory before a test, and measure its peak from zero.

    Returns:
        A decorator.

    Example:
        >>> from colossal.legacy.testing import clear_cache_before_run
        >>> @clear_cache_before_run()
        ... def run():
        ...     return "done"
        >>> run()
        'done'
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            gc.collect()
            accelerator = get_accelerator()
            if not accelerator.is_cpu:
                accelerator.empty_cache()
                accelerator.reset_peak_memory_stats()
                accelerator.synchronize()
            return function(*args, **kwargs)

        return call

    return decorate


def run_on_environment_flag(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Skip a test unless an environment variable is 1.

    Args:
        name: The name of the variable, which is in capitals.

    Returns:
        A decorator. The test raises `unittest.SkipTest` where it is not, which test runners report.

    Example:
        >>> import unittest
        >>> from colossal.legacy.testing import run_on_environment_flag
        >>> @run_on_environment_flag("SLOW_TESTS")
        ... def run():
        ...     return "done"
        >>> try:
        ...     run()
        ... except unittest.SkipTest as skipped:
        ...     print(skipped)
        SLOW_TESTS is not 1
    """
    variable = name.upper()
    return unittest.skipUnless(os.environ.get(variable) == "1", f"{variable} is not 1")


@final
class DummyDataloader:
    """An iterable that makes each batch by a function.

    Args:
        data_gen_fn: Makes a batch.
        length: Number of batches.

    Attributes:
        step: Number of batches that were made since the last `iter`.

    Example:
        >>> from colossal.legacy.testing import DummyDataloader
        >>> list(DummyDataloader(lambda: "batch", length=2))
        ['batch', 'batch']
    """

    def __init__(self, data_gen_fn: Callable[[], Any], length: int = 10) -> None:
        self.data_gen_fn, self.length, self.step = data_gen_fn, length, 0

    def __iter__(self) -> Iterator[Any]:
        self.step = 0
        return self

    def __next__(self) -> Any:
        if self.step >= self.length:
            raise StopIteration
        self.step += 1
        return self.data_gen_fn()

    def __len__(self) -> int:
        return self.length
