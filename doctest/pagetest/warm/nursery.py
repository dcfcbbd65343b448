"""The nursery: keeps a warm parent for each of the pages that were run last, and starts their commands by it."""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagetest.run.starting import Command, start_cold
from pagetest.warm.fork import Forked, Parent
from pagetest.warm.launch import Launch, read_launch

MAX_PARENTS = 4
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
    parent: Parent | None = None

    def drop_parent(self) -> None:
        if self.parent:
            self.parent.close()
            self.parent = None


@dataclass
class Nursery:
    """Starts commands, by a fork where it can.

    Attributes:
        was_warm: Whether the last command was forked.
    """

    was_warm: bool = False
    _home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pages-")))
    _scripts: dict[Path, _Script] = field(default_factory=dict)

    def start(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Command:
        """Starts the command of a page, by a fork if a warm parent can stand for it, else as it is."""
        launch, file = read_launch(words), Path(environment["COLOSSAL_PAGE_SCRIPT"])
        environment = {**environment, "COLOSSAL_PAGE_MODULES": str(self._list_of(file))}
        known = self._scripts.pop(file, None) or _Script(launch, environment)
        known.launch = launch
        self._scripts[file] = known
        fit = [script.parent for script in self._scripts.values() if script.parent and script.parent.is_fit]
        pid = 0
        if launch.is_plain and known.parent in fit:
            order = {"ranks": launch.ranks, "arguments": launch.arguments, "environment": environment, "words": words}
            pid = known.parent.fork({**order, "folder": str(folder), "log": str(log)})
        self.was_warm = bool(pid)
        return Forked(pid) if pid else start_cold(words, folder, environment, log)

    def expect(self, file: Path, imports: frozenset[str]) -> None:
        """Says what a script imports of other packages now, before it is run.

        A parent that has imported more is dropped: in its forks the script would find modules that it does not import
        itself, and might pass where it must fail.
        """
        known = self._scripts.get(file)
        if known and not known.imports <= imports:
            known.drop_parent()

    def prepare(self, file: Path, imports: frozenset[str]) -> None:
        """Makes a parent for a script that has just run, unless it has one that knows nearly all of its modules."""
        known, modules = self._scripts.get(file), self._list_of(file)
        if not known or not known.launch.is_plain or sys.platform != "linux":  # elsewhere no one adopts orphans
            return
        names = modules.read_text(encoding="utf-8").splitlines() if modules.is_file() else sorted(imports)
        if known.parent and known.parent.is_alive and len({*names} - known.parent.modules) < MANY_MODULES:
            return
        known.drop_parent()
        known.parent = Parent(
            known.environment, file.parent.parent, [*names, *(_LAUNCHER if known.launch.ranks else ())]
        )
        known.imports = imports
        for old in [script for script in self._scripts.values() if script.parent][:-MAX_PARENTS]:
            old.drop_parent()

    def close(self) -> None:
        """Ends all parents."""
        for known in self._scripts.values():
            known.drop_parent()
        shutil.rmtree(self._home, ignore_errors=True)

    def _list_of(self, file: Path) -> Path:
        return self._home / str(file).replace("/", "%")
