"""What the nodes print, line by line, each with its node in front."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO, final

import click

STALE_SECONDS = 1.0
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
_MAX_LINE_BYTES = 1 << 20


@final
class Lines:
    """Splits a stream of bytes into lines.

    A carriage return takes back what stands in its line, as on a terminal. A line that stays open is shown as it is
    after a second, so that a progress bar becomes one line a second.
    """

    def __init__(self) -> None:
        self._rest, self._since, self._shown = b"", 0.0, False

    def feed(self, data: bytes) -> list[str]:
        """Add received bytes; return the lines that are complete now."""
        if not self._rest:
            self._since = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines and self._shown and not lines[0].strip():
            del lines[0]  # the newline of what has been shown
        if len(self._rest) > _MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            self._shown, self._since = False, time.monotonic()
        return [_visible(line) for line in lines]

    def stale(self, seconds: float = STALE_SECONDS) -> list[str]:
        """Return the open line, if it has been open for that long."""
        if not self._rest.strip() or time.monotonic() - self._since < seconds:
            return []
        line, self._rest, self._shown = _visible(self._rest), b"", True
        return [line]


def _visible(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


@final
class Printer:
    """Writes lines of several nodes without mixing them, in one color per node on a terminal."""

    def __init__(self, names: Sequence[str]) -> None:
        width = max(map(len, names), default=0)
        self._prefixes = [f"{name:<{width}} | " for name in names]
        self._lock = threading.Lock()
        self._broken = False

    def write(self, node: int, line: str, *, error: bool = False) -> None:
        """Write a line of a node; raise OSError once if the stream is closed."""
        stream = sys.stderr if error else sys.stdout
        prefix = self._prefixes[node]
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            prefix = click.style(prefix, fg=_COLORS[node % len(_COLORS)])
        with self._lock:
            if self._broken:
                return
            try:
                stream.write(f"{prefix}{line}\n")
                stream.flush()
            except OSError:
                self._broken = True
                _silence(stream)
                raise


def _silence(stream: TextIO) -> None:
    """Let what is left in a stream go nowhere, or Python would fail on it at exit, with a status of its own."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
