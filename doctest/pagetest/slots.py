"""The slots: how many ranks may run at a time, over all processes that run pages."""

import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pagetest.model.page import Page
from pagetest.warm.launch import read_launch

POLL_SECONDS = 0.05
MIN_SLOTS = 4

# [Note: slots]
# A slot is a file, and who holds its lock holds the slot, so a process that dies gives its slots back. Whoever needs
# several takes them one by one while it holds the gate, a lock of its own: no other process takes any meanwhile, and
# so two that need many cannot each hold half. Ranks wait for each other much of their time, so a small machine has
# a few more slots than cores.


@dataclass(frozen=True)
class Slots:
    """A pool of slots for several processes; see [Note: slots]."""

    folder: Path
    num_slots: int

    @contextmanager
    def acquire(self, ranks: int) -> Iterator[None]:
        """Waits until that many slots are free, or all where there are fewer, and holds them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            with self._lock("gate") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                files = [held.enter_context(self._lock(str(number))) for number in range(self.num_slots)]
                _acquire_files(files, min(ranks, self.num_slots))
            yield

    @contextmanager
    def _lock(self, name: str) -> Iterator[int]:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def slots_needed(page: Page) -> int:
    """The ranks for which a page takes slots; more than there are where it asks to run alone."""
    if page.exclusive:
        return sys.maxsize
    with suppress(ValueError):  # a command that cannot be split: the page is refused before it runs
        return read_launch(shlex.split(page.command)).ranks or 1
    return 1


def default_num_slots() -> int:
    """One for each core that this process may use, and a few at least."""
    return max(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MIN_SLOTS)


def _acquire_files(files: list[int], wanted: int) -> None:
    """Waits until that many of the files are ours."""
    free = list(files)
    while wanted:
        for file in list(free):
            if wanted and _try_lock(file):
                free.remove(file)
                wanted -= 1
        if wanted:
            time.sleep(POLL_SECONDS)


def _try_lock(file: int) -> bool:
    """Whether the slot is ours now."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
