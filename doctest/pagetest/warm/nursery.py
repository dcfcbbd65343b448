"""The nursery: keeps a warm parent for each of the pages that were run last, and starts their commands by it."""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagetest.run.starting import Command, start_command
from pagetest.warm.fork import ForkedProcess, ForkServer
from pagetest.warm.launch import Launch, read_launch

MAX_SERVERS = 4
MANY_MODULES = 20

_LAUNCHER = ("torch", "torch.distributed")


@dataclass
class _Script:
    """What is known of a page's script.

    Attributes:
        imports: What it imported of other packages when its parent was made, as its text says.
    """

    launch: Launch
    environment: Mapping[str, str]
    imports: frozenset[str] = frozenset()
    server: ForkServer | None = None

    def stop_server(self) -> None:
        if self.server:
            self.server.close()
            self.server = None


@dataclass
class ForkServerPool:
    """Starts commands, by a fork where it can.

    Attributes:
        was_forked: Whether the last command was forked.
    """

    was_forked: bool = False
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pages-")))
    _scripts: dict[Path, _Script] = field(default_factory=dict)

    def start(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Command:
        """Starts the command of a page, by a fork if a warm parent can stand for it, else as it is."""
        launch, file = read_launch(words), Path(environment["COLOSSAL_PAGE_SCRIPT"])
        environment = {**environment, "COLOSSAL_PAGE_MODULES": str(self._module_list(file))}
        known = self._scripts.pop(file, None) or _Script(launch, environment)
        known.launch = launch
        self._scripts[file] = known
        fit = [script.server for script in self._scripts.values() if script.server and script.server.can_fork]
        pid = 0
        if launch.is_plain and known.server in fit:
            order = {"ranks": launch.ranks, "arguments": launch.arguments, "environment": environment, "words": words}
            pid = known.server.fork({**order, "folder": str(folder), "log": str(log)})
        self.was_forked = bool(pid)
        return ForkedProcess(pid) if pid else start_command(words, folder, environment, log)

    def drop_unfit(self, file: Path, imports: frozenset[str]) -> None:
        """Says what a script imports of other packages now, before it is run.

        A parent that has imported more is dropped: in its forks the script would find modules that it does not import
        itself, and might pass where it must fail.
        """
        known = self._scripts.get(file)
        if known and not known.imports <= imports:
            known.stop_server()

    def start_server(self, file: Path, imports: frozenset[str]) -> None:
        """Makes a parent for a script that has just run, unless it has one that knows nearly all of its modules."""
        known, modules = self._scripts.get(file), self._module_list(file)
        if not known or not known.launch.is_plain or sys.platform != "linux":  # elsewhere no one adopts orphans
            return
        names = modules.read_text(encoding="utf-8").splitlines() if modules.is_file() else sorted(imports)
        if known.server and known.server.is_alive and len({*names} - known.server.modules) < MANY_MODULES:
            return
        known.stop_server()
        known.server = ForkServer(
            known.environment, file.parent.parent, [*names, *(_LAUNCHER if known.launch.ranks else ())]
        )
        known.imports = imports
        for old in [script for script in self._scripts.values() if script.server][:-MAX_SERVERS]:
            old.stop_server()

    def close(self) -> None:
        """Ends all parents."""
        for known in self._scripts.values():
            known.stop_server()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _module_list(self, file: Path) -> Path:
        return self._folder / str(file).replace("/", "%")
