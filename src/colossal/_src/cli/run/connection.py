"""A two-way stream of bytes to the supervisor of a node, and the shortest one: a pipe on this machine."""

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, final

BOOT = "import sys;source=sys.stdin.buffer;exec(compile(source.read(int(source.readline())),'supervisor','exec'))"
"""What the node's Python does first: it reads the supervisor, its length in front."""

_CHUNK_BYTES = 65536
_END_SECONDS = 20.0


class NodeConnection(Protocol):
    """How the launcher talks to one supervisor."""

    @property
    def name(self) -> str:
        """Under which name the other nodes find this one."""
        ...

    def open(self) -> None:
        """Start the node's Python; raise LaunchError if the node cannot be reached."""

    def send(self, data: bytes) -> None:
        """Send bytes; OSError if the link is down."""

    def receive(self, seconds: float | None) -> bytes | None:
        """Return what came: None if nothing did for that long, nothing (``b""``) if the link is down."""

    def complaint(self) -> str:
        """Return what the node's shell or Python wrote to its standard error, once the link is down."""
        ...

    def close(self) -> None:
        """Hang up, which ends a job that still runs."""


@final
class LocalConnection:
    """A supervisor on this machine, a session of its own, so that Ctrl-C reaches the launcher alone."""

    def __init__(self, name: str, streams: Sequence[int] = ()) -> None:
        self._name, self._streams = name, streams
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """The name by which the user called this machine."""
        return self._name

    def open(self) -> None:
        """Start the supervisor's Python."""
        self._process = subprocess.Popen(  # noqa: S603 (our own command)
            [sys.executable, "-I", "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(self._streams),
            start_new_session=True,
            bufsize=0,
        )

    def send(self, data: bytes) -> None:
        """Write to its standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def receive(self, seconds: float | None) -> bytes | None:
        """Read from its standard output."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, _CHUNK_BYTES) if ready else None

    def complaint(self) -> str:
        """Read what it wrote to its standard error."""
        assert self._process is not None
        assert self._process.stderr is not None
        return self._process.stderr.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Close its standard input, and wait until it has ended what it started."""
        process = self._process
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.stderr.close()  # type: ignore[union-attr]
