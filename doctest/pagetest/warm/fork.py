"""Warm processes: forks of a parent that has imported what a page imports of other packages."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagetest.run.environment import PROBE

READY_SECONDS = 120.0

_PROGRAM = "__import__('sys').path.insert(0, {probe!r}); __import__('page_parent').serve(globals(), {descriptor})"


class ForkedProcess:
    """A process that another one forked and that became our child; used like a `subprocess.Popen`.

    Args:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code.

        Raises:
            subprocess.TimeoutExpired: The time was up before.
        """
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
        return code


class ForkServer:
    """A process that has imported modules and forks on demand; see [Note: warm processes] in the probe.

    Args:
        environment: The environment of the page.
        folder: Where it lives: not in the page's own folder, which is emptied before each run.
        modules: What to import.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path, modules: Sequence[str]) -> None:
        self.modules = frozenset(modules)
        ours, theirs = socket.socketpair()
        with theirs:
            program = _PROGRAM.format(probe=str(PROBE), descriptor=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=folder,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._link = ours
        self._link.settimeout(READY_SECONDS)
        self._lines = ours.makefile("rw", encoding="utf-8")
        self._facts: dict[str, Any] | None = None
        self._send({"modules": list(modules)})

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs."""
        return self._process.poll() is None

    @property
    def can_fork(self) -> bool:
        """Whether it can fork without harm; waits until its imports are done."""
        if self._facts is None:
            self._facts = self._receive()
        return self._facts.get("threads") == 1 and self.is_alive

    def fork(self, order: Mapping[str, Any]) -> int:
        """Makes a process that carries out the order, and returns its number; 0 if the parent is gone."""
        self._send(order)
        return self._receive().get("pid", 0)

    def close(self) -> None:
        """Ends the parent; what it forked lives on."""
        with suppress(OSError):
            self._lines.close()
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _send(self, content: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self._lines.write(json.dumps(content) + "\n")
            self._lines.flush()

    def _receive(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return json.loads(self._lines.readline())
        return {}
