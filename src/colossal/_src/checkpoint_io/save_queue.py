"""Runs saves, immediately or in the background, and reports their errors."""

import atexit
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import final

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.content import Content, agree
from colossal._src.checkpoint_io.destination import Destination
from colossal._src.checkpoint_io.file_writers import Arenas, FileWriter, run_save

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
            # one thread: saves communicate, so that all ranks must run them in one order
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="colossal-checkpoint")
        self._pending.append(self._pool.submit(self._run, job, always, lastly))
        _UNFINISHED.add(self)
        self._large.extend([self._pending[-1]] if large else [])

    def _run(self, job: Callable[[], None], always: bool, lastly: Callable[[], None]) -> None:
        try:
            # what follows a failed save, such as its commit, must not publish half of it
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

    def wait(self) -> None:
        """Wait until all saves are done, whose errors stay for the next call of `check` or `drain`."""
        wait(self._pending)

    def forget(self) -> None:
        """Wait until all saves are done and forget them, errors included: they have been raised already."""
        with contextlib.suppress(Exception):
            self.drain()


# strong references: a save goes on although the program has dropped what began it
_UNFINISHED: set[Background] = set()


def wait_for_saves() -> None:
    """Wait for all saves of this process: what one `CheckpointIO` writes in the background, another one may load."""
    for background in list(_UNFINISHED):
        background.wait()


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
        # nothing else can change the exit code at this point
        os._exit(1)


_LARGE_BYTES = 1 << 20  # a copy that counts when too many wait


@final
class SaveQueue:
    """Carries out saves in the order in which they were asked for."""

    def __init__(self, writers: CheckpointGroup) -> None:
        self._writers = writers
        self._background_group: CheckpointGroup | None = None
        self._background, self._arenas = Background(), Arenas()

    def save(
        self,
        collect_content: Callable[[], Content],
        make_writer: Callable[[Content, str], FileWriter],
        destination: Callable[[], Destination],
        use_async: bool,
    ) -> None:
        """Save something."""
        save_id = self._begin(self._background.check if use_async else self._drain)
        save, where = make_writer(agree(self._writers, collect_content), save_id), destination()
        if not use_async:
            run_save(save, self._writers, self._arenas, where)
            return
        large = save.total_size > _LARGE_BYTES
        self._background.make_room(large)
        # before training goes on, which changes the originals
        give_back = save.copy(self._writers, self._arenas)
        self._background.submit(
            partial(run_save, save, self._get_background_group(), self._arenas, where), large, lastly=give_back
        )

    def after(self, job: Callable[[], None], use_async: bool, always: bool) -> None:
        """Do something on the first rank once everything saved so far is on the disk."""
        if use_async:
            self._begin(self._background.check)
            self._background.submit(partial(self._get_background_group().write, job), always=always)
        else:
            self.wait_until_saved()
            self._writers.write(job)

    def wait_until_saved(self) -> None:
        """Wait until everything that this process saved is on the disk."""
        self._begin(self._drain)

    def _drain(self) -> None:
        wait_for_saves()
        self._background.drain()

    def _begin(self, collect_content: Callable[[], None]) -> str:
        """Raise the failures of earlier saves, on all ranks together; return an identifier that all agree on."""
        try:
            return self._writers.gather(lambda: collect_content() or os.urandom(8).hex())[0]
        except Exception:
            self._background.forget()
            raise

    def _get_background_group(self) -> CheckpointGroup:
        """Return the writers of the background, which all ranks make together when they are first needed."""
        self._background_group = self._background_group or self._writers.make_background_group()
        return self._background_group
