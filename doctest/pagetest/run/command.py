"""A command: how it is started, and how it and all its processes ended."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Command(Protocol):
    """A command that has been started: its supervisor, a child of this process."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code; raises `subprocess.TimeoutExpired` when the time is up before."""
        ...


_SUPERVISOR = Path(__file__).parent / "probe" / "page_supervisor.py"

StartCommand = Callable[[Sequence[str], Path, Mapping[str, str], Path], Command]
"""Starts a command in a folder with an environment, below a supervisor, and appends what it prints to a log."""


def start_command(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Command:
    """Starts a command as a shell would."""
    if not shutil.which(words[0], path=environment.get("PATH")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), words[0])
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@dataclass(frozen=True)
class LeftoverProcess:
    """A process that was still there after its command had ended."""

    pid: int
    command: str


@dataclass(frozen=True)
class CommandOutcome:
    """How a session ended."""

    returncode: int
    timed_out: bool  # whether the limit was reached
    seconds: float
    peak_bytes: int
    leftovers: tuple[LeftoverProcess, ...]  # processes that outlived the command; they have been killed
