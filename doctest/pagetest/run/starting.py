"""The start of a command: what a session asks for, and how a shell would do it."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Command(Protocol):
    """A command that has been started, a child of this process."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code; raises `subprocess.TimeoutExpired` when the time is up before."""
        ...


Start = Callable[[Sequence[str], Path, Mapping[str, str], Path], Command]
"""Starts words in a folder with an environment, in a session of its own, and appends what it prints to a log."""


def start_cold(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Command:
    """Starts a command as a shell would."""
    with log.open("ab") as output:
        return subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
