"""Which tests of the documentation tools need not run again: those whose inputs are what they were when they passed.

Only `.ci/run` asks for it, by ``COLOSSAL_CHECK=changed``; without it every test runs. A test that reads the project's
own code or pages is marked ``project``, and always runs.
"""

import hashlib
import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from pagetest.results.selection import is_wanted

STORE = "tests/unchanged.json"

_ALWAYS = ("constraints.txt", "pyproject.toml", "tests/conftest.py", "tests/helpers")
_EMITTERS = ("docs_build.py", "doctest/pagebuild", "docs/conftest.py", "docs/sphinx", "docs/website")
_HARNESS = ("docs_test.py", "doctest/pagetest", "tests/pagetest/conftest.py")
INPUTS: Mapping[str, tuple[str, ...]] = {
    "tests/pagetest": (*_ALWAYS, *_HARNESS, "tests/pagetest"),
    "tests/pagebuild": (*_ALWAYS, *_HARNESS, *_EMITTERS, "tests/pagebuild"),
}
"""What the tests of a folder depend on, besides the versions of Python and torch."""


def fingerprint(inputs: Iterable[str], root: Path) -> str:
    """Return what stands for the files and folders that tests depend on: the files that git knows or would add.

    Empty outside a repository, where nothing says which files these are.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *inputs]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        return ""
    files = [root / name for name in sorted(set(done.stdout.split("\0"))) if name]
    digest = hashlib.sha256(" ".join((*platform.python_version_tuple()[:2], version("torch"))).encode())
    for file in files:
        if file.is_file():
            digest.update(f"\0{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


class Unchanged:
    """Leaves out tests whose inputs have not changed since they passed, and notes for ``--record`` that they passed."""

    def __init__(self, config: pytest.Config, inputs: Mapping[str, Iterable[str]] = INPUTS) -> None:
        self.config, self.inputs = config, inputs
        self.store = config.rootpath / STORE
        known = json.loads(self.store.read_text(encoding="utf-8")) if self.store.is_file() else {}
        self.record: dict[str, dict[str, str]] = known
        self.now = {folder: fingerprint(files, config.rootpath) for folder, files in inputs.items()}
        self.outcomes: dict[str, Counter[str]] = {folder: Counter() for folder in inputs}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect the tests of folders whose record holds."""
        if not is_wanted():
            return
        held = [item for item in items if self._folder(item.nodeid) in self.held]
        dropped = {item for item in held if not item.get_closest_marker("project")}
        self.config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what became of the tests."""
        if (folder := self._folder(report.nodeid)) and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[folder][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left out, and since when it holds."""
        for folder in self.held if is_wanted() else ():
            terminalreporter.write_line(f"{folder}: its inputs have not changed since {self.record[folder]['date']}")

    def pytest_sessionfinish(self) -> None:
        """Note the folders all of whose tests ran and passed, in the process that knows it of all."""
        config = self.config
        if not config.getoption("record") or hasattr(config, "workerinput"):
            return
        is_whole = not (is_wanted() or config.option.keyword or config.option.markexpr)
        for folder, outcomes in self.outcomes.items():
            is_asked = any(Path(folder).is_relative_to(argument) for argument in config.args)
            if is_whole and is_asked and outcomes["passed"] and not outcomes["failed"]:
                self.record[folder] = {"inputs": self.now[folder], "date": datetime.now(UTC).date().isoformat()}
        self.store.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")

    @property
    def held(self) -> list[str]:
        """The folders whose tests passed with the inputs of now."""
        known = {folder: self.record.get(folder, {}).get("inputs") for folder in self.now}
        return [folder for folder, inputs in self.now.items() if inputs and inputs == known[folder]]

    def _folder(self, nodeid: str) -> str:
        return next((folder for folder in self.inputs if nodeid.startswith(f"{folder}/")), "")
