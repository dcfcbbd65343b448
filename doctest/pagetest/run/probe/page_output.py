"""Captures what rank 0 prints. Imports no harness, as the probe, and the harness uses it too."""

import fcntl
import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

STDOUT, STDERR = 1, 2
FIGURES = (".svg", ".png")

_CHUNK = 1 << 20

# [Note: capturing rank 0]
# What rank 0 prints must be known apart from what the other ranks and stderr print, whoever in its process prints:
# Python, C code, a subprocess. So descriptor 1 of rank 0 is a file of its own. The log must still show every line at
# its place among the others. So whoever writes through `sys.stdout` of rank 0 copies what is new in that file to the
# log at once, whoever writes through its `sys.stderr` does so before, and the harness does it ten times a second for
# what C code and subprocesses print. A count under a lock, in a third file, says what has been copied already.


class CapturedOutput:
    """What rank 0 has printed so far, and its copy in the log; see [Note: capturing rank 0]."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "printed"
        self.log = folder / "log"
        self.copied = folder / "copied"

    def request(self, log: Path) -> None:
        """Asks the page's rank 0 to print into a file of its own; the harness calls it before the page starts."""
        self.file.touch()
        self.log.symlink_to(log)

    @property
    def is_requested(self) -> bool:
        """Whether the harness asked for it."""
        return self.file.exists()

    @property
    def size(self) -> int:
        """The bytes printed so far."""
        return self.file.stat().st_size

    def copy_new(self) -> None:
        """Copies what is new, if capturing was asked for and no one else is copying; the harness calls it."""
        if self.is_requested:
            self.copy_to_log(wait=False)

    def copy_to_log(self, wait: bool = True) -> None:
        """Appends to the log what is new; without `wait`, only if no one else is doing so."""
        lock = os.open(self.copied, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                self._copy(lock)
                fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile holds the descriptor, and not the lock
        finally:
            os.close(lock)

    def _copy(self, count: int) -> None:
        done = int(os.pread(count, 20, 0) or 0)
        with self.file.open("rb") as new, self.log.open("ab", buffering=0) as log:
            new.seek(done)
            while chunk := new.read(_CHUNK):
                done += log.write(chunk)
                new.seek(done)
        os.pwrite(count, b"%020d" % done, 0)

    def redirect_stdout(self) -> None:
        """Redirects this process's stdout to the file, if it goes to the log; what a page has redirected stays so."""
        if _is_same(STDOUT, self.log):
            own = os.open(self.file, os.O_WRONLY | os.O_APPEND)
            os.dup2(own, STDOUT)
            os.close(own)
        if _is_same(STDOUT, self.file):
            sys.stdout = sys.__stdout__ = _like(sys.stdout, LoggedStream(self, STDOUT))
            sys.stderr = sys.__stderr__ = _like(sys.stderr, LoggedStream(self, STDERR))

    def flush(self) -> None:
        """Empties Python's buffers; C has none, for the environment says PYTHONUNBUFFERED."""
        for stream in (sys.stdout, sys.__stdout__):
            with suppress(AttributeError, ValueError, OSError):
                stream.flush()  # type: ignore[union-attr]
        self.copy_to_log()


class LoggedStream(io.FileIO):
    """A standard stream that keeps its place in the log."""

    # What rank 0 printed is copied after a write to stdout, and before one to stderr.

    def __init__(self, printed: CapturedOutput, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.printed = printed

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        """Writes, and keeps the order of lines in the log."""
        if self.fileno() == STDERR:
            self._copy_to_log()
        count = super().write(data)
        if self.fileno() == STDOUT:
            self._copy_to_log()
        return count

    def _copy_to_log(self) -> None:
        with suppress(OSError):  # a process that outlived its page finds no folder any more
            self.printed.copy_to_log()


def _is_same(descriptor: int, file: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), file.stat())
    return False


def _like(stream: Any, raw: io.FileIO) -> io.TextIOWrapper:
    """A stream that differs from the given one in what is below it only."""
    raw.name = stream.name
    new = io.TextIOWrapper(
        raw, stream.encoding, stream.errors, newline="\n", line_buffering=stream.line_buffering, write_through=True
    )
    new.mode = "w"  # type: ignore[misc]
    return new
