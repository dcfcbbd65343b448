"""A session: a command and every process that comes of it, from the start until none is left."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pagetest.limits import scaled
from pagetest.run.command import Command, CommandOutcome, LeftoverProcess, StartCommand, start_command

SAMPLE_SECONDS = 0.1
GRACE_SECONDS = 3.0
LINGER_SECONDS = 5.0

_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = re.compile(r"torch_(\d+)_")


@dataclass
class Session:
    """Runs one command."""

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    log: Path  # file that takes its output
    limit_seconds: float
    at_limit: Callable[[], None]  # called when the time is up, before the processes are killed
    echo: bool = False  # whether the output is shown as it comes
    # Called again and again while the command runs, and once after its end.
    at_sample: Callable[[], None] = lambda: None
    start: StartCommand = start_command
    _peak_bytes: int = 0
    _shown: int = 0
    _seen_processes: set[psutil.Process] = field(default_factory=set)
    _other_children: set[psutil.Process] = field(default_factory=set)

    def run(self) -> CommandOutcome:
        """Runs the command to its end, and ends all of its processes, whatever happens."""
        adopt_orphans()
        self._other_children = set(psutil.Process().children(recursive=True))
        start = time.monotonic()
        self.log.write_bytes(b"")
        command = self.start(self.command, self.folder, self.environment, self.log)
        try:
            timed_out = not self._sample_until_end(command, start + self.limit_seconds)
            seconds = time.monotonic() - start
            if timed_out:
                self.at_limit()
                self._terminate(command)
            leftovers = () if timed_out else self._leftovers(command)
        finally:
            self._kill(command)
            self._show_log()
            self._clear_shared_memory()
        return CommandOutcome(command.wait(), timed_out, seconds, self._peak_bytes, leftovers)

    def _sample_until_end(self, command: Command, deadline: float) -> bool:
        """Samples until the command has ended; False when the time is up before."""
        while time.monotonic() < deadline:
            self._sample(command)
            self._show_log()
            with suppress(subprocess.TimeoutExpired):
                command.wait(max(0.0, min(SAMPLE_SECONDS, deadline - time.monotonic())))
                return True
        return False

    def _sample(self, command: Command) -> None:
        total = 0
        for process in self._living_processes():
            with suppress(psutil.Error):
                total += process.memory_info().rss if process.pid != command.pid else 0
        self._peak_bytes = max(self._peak_bytes, total)

    def _living_processes(self) -> list[psutil.Process]:
        """Every living process of the session; orphans are ours, because we adopt them."""
        living = []
        for process in set(psutil.Process().children(recursive=True)) | self._seen_processes:
            with suppress(psutil.Error):
                if process not in self._other_children and process.is_running():
                    self._seen_processes.add(process)
                    living += [process] if process.status() != psutil.STATUS_ZOMBIE else []
        return living

    def _leftovers(self, command: Command) -> tuple[LeftoverProcess, ...]:
        """What is still there when helpers that end with their parent have had a moment to do so."""
        self._wait_for_end(command, scaled(LINGER_SECONDS))
        found = []
        for process in self._living_processes():
            with suppress(psutil.Error):
                found.append(LeftoverProcess(process.pid, " ".join(process.cmdline())))
        return tuple(found)

    def _terminate(self, command: Command) -> None:
        with suppress(psutil.Error, ProcessLookupError):
            for below in psutil.Process(command.pid).children():
                os.killpg(below.pid, signal.SIGTERM)
        self._wait_for_end(command, scaled(GRACE_SECONDS))

    def _wait_for_end(self, command: Command, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._living_processes() and time.monotonic() < deadline:
            command.poll()
            time.sleep(SAMPLE_SECONDS / 5)

    def _kill(self, command: Command) -> None:
        """Kills until two looks find nothing: a process may have started another one during the first."""
        while living := self._living_processes() or self._living_processes():
            for process in living:
                with suppress(psutil.Error):
                    process.kill()
            command.poll()
            time.sleep(SAMPLE_SECONDS / 10)
        command.wait()
        for process in self._seen_processes:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)

    def _show_log(self) -> None:
        self.at_sample()
        if self.echo:
            with self.log.open("rb") as log:
                log.seek(self._shown)
                sys.stdout.write(log.read().decode(errors="replace"))
                self._shown = log.tell()
            sys.stdout.flush()

    def _clear_shared_memory(self) -> None:
        """Removes the shared tensors of processes that died before they could."""
        pids = {process.pid for process in self._seen_processes}
        for file in Path("/dev/shm").glob("torch_*"):  # noqa: S108
            match = _SHARED_MEMORY.match(file.name)
            if match and int(match.group(1)) in pids:
                file.unlink(missing_ok=True)


def adopt_orphans() -> None:
    """Makes this process the parent of every orphan below it, so that none can slip away by a double fork or setsid."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
