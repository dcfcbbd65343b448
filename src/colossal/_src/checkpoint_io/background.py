"""Saves that go on while training does, and whose errors are not lost."""

import atexit
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final

_MAX_LARGE = 2  # as a model and its optimizer: a third save waits, so that copies do not fill the memory


@final
class Background:
    """A thread that runs saves, one after the other.

    An error is raised by the next call of `check` or `drain`. If there is none, it is printed when the program ends,
    whose exit code is 1 then.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._large: list[Future[None]] = []
        self._failed = False

    def submit(
        self,
        job: Callable[[], None],
        large: bool = False,
        always: bool = False,
        lastly: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a save as soon as those before it are done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="colossal-checkpoint")
        self._pending.append(self._pool.submit(self._run, job, always, lastly))
        _UNFINISHED.add(self)
        self._large.extend([self._pending[-1]] if large else [])

    def _run(self, job: Callable[[], None], always: bool, lastly: Callable[[], None]) -> None:
        try:
            if always or not self._failed:
                job()
        except BaseException:
            self._failed = True
            raise
        finally:
            lastly()

    def make_room(self, large: bool) -> None:
        """Wait until few enough large saves are unfinished for another copy to be held in memory."""
        self._large = [future for future in self._large if not future.done()]
        if large:
            wait(self._large[: max(0, len(self._large) + 1 - _MAX_LARGE)])

    def check(self) -> None:
        """Raise the error of a save that has failed, if there is one; forget those that succeeded."""
        while self._pending and self._pending[0].done() and self._pending[0].exception() is None:
            self._pending.popleft()
        for future in self._pending:
            error = future.exception() if future.done() else None
            if error is not None:
                raise error

    def drain(self) -> None:
        """Wait until all saves are done."""
        try:
            wait(self._pending)
            self.check()
        finally:
            self._pending.clear()
            self._failed = False
            _UNFINISHED.discard(self)
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

    def forget(self) -> None:
        """Wait until all saves are done and forget them, errors included: they have been raised already."""
        with contextlib.suppress(Exception):
            self.drain()


_UNFINISHED: set[Background] = set()


@atexit.register
def _finish() -> None:
    """Wait for the saves of a program that ends, and let it fail if one of them did."""
    failed = False
    for background in list(_UNFINISHED):
        try:
            background.drain()
        except Exception as error:  # noqa: BLE001 - reported, and the exit code is set
            failed = True
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - logging may be shut down
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
