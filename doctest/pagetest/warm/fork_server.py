"""Fork servers: processes that have imported the packages of a page, and fork into it."""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagetest.limits import scaled
from pagetest.run.command import Command, start_command
from pagetest.run.environment import PROBE
from pagetest.warm.launch import Launch, read_launch

READY_SECONDS = 120.0

_PROGRAM = "__import__('sys').path.insert(0, {probe!r}); __import__('page_fork_server').serve(globals(), {descriptor})"
MAX_SERVERS = 4
MANY_MODULES = 20
_LAUNCHER = ("torch", "torch.distributed")


class ForkedProcess:
    """A process forked by a server and adopted by this one; used like a `subprocess.Popen`."""

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
        """Waits for the exit code."""
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
    """A process that has imported modules and forks on request; see [Note: warm processes] in page_fork_server."""

    # `folder` is not the page's own folder, which is emptied before each run.

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
        self._link.settimeout(scaled(READY_SECONDS))
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

    def fork(self, request: Mapping[str, Any]) -> int:
        """Forks a process that runs the requested command, and returns its pid; 0 if the server has ended."""
        self._send(request)
        return self._receive().get("pid", 0)

    def close(self) -> None:
        """Ends the server; the processes that it forked go on."""
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


@dataclass
class _Script:
    """What is known of a page's script."""

    launch: Launch
    environment: Mapping[str, str]
    # What the script imported of other packages when its server was started.
    imports: frozenset[str] = frozenset()
    server: ForkServer | None = None

    def stop_server(self) -> None:
        if self.server:
            self.server.close()
            self.server = None


@dataclass
class ForkServerPool:
    """Starts commands of pages; by a fork of a process that has imported the page's packages, where there is one."""

    was_forked: bool = False  # whether the last command was forked
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pages-")))
    _scripts: dict[Path, _Script] = field(default_factory=dict)

    def start(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Command:
        """Starts the command of a page: by a fork if the script has a fork server, else as a shell would."""
        launch, file = read_launch(words), Path(environment["COLOSSAL_PAGE_SCRIPT"])
        environment = {**environment, "COLOSSAL_PAGE_MODULES": str(self._module_list(file))}
        script = self._scripts.pop(file, None) or _Script(launch, environment)
        script.launch = launch
        self._scripts[file] = script
        ready = [script.server for script in self._scripts.values() if script.server and script.server.can_fork]
        pid = 0
        if launch.is_plain and script.server in ready:
            request = {"ranks": launch.ranks, "arguments": launch.arguments, "environment": environment, "words": words}
            pid = script.server.fork({**request, "folder": str(folder), "log": str(log)})
        self.was_forked = bool(pid)
        return ForkedProcess(pid) if pid else start_command(words, folder, environment, log)

    def drop_unfit(self, file: Path, imports: frozenset[str]) -> None:
        """Stops the fork server of a script if it has imported more than the script now does."""
        # In the forks of such a server the script would find modules that it does not import itself, and
        # might pass where it must fail.
        script = self._scripts.get(file)
        if script and not script.imports <= imports:
            script.stop_server()

    def start_server(self, file: Path, imports: frozenset[str]) -> None:
        """Starts a server for a script that has just run, unless one has nearly all of its modules."""
        script, modules = self._scripts.get(file), self._module_list(file)
        if not script or not script.launch.is_plain or sys.platform != "linux":  # elsewhere no one adopts orphans
            return
        names = modules.read_text(encoding="utf-8").splitlines() if modules.is_file() else sorted(imports)
        if script.server and script.server.is_alive and len({*names} - script.server.modules) < MANY_MODULES:
            return
        script.stop_server()
        script.server = ForkServer(
            script.environment, file.parent.parent, [*names, *(_LAUNCHER if script.launch.ranks else ())]
        )
        script.imports = imports
        for old in [script for script in self._scripts.values() if script.server][:-MAX_SERVERS]:
            old.stop_server()

    def close(self) -> None:
        """Stops all servers."""
        for script in self._scripts.values():
            script.stop_server()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _module_list(self, file: Path) -> Path:
        return self._folder / str(file).replace("/", "%")
