"""The recorder: writes the results of pages as records, with what they depend on and what was printed and drawn."""

import getpass
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagetest.graph.fingerprint import common_inputs
from pagetest.results.records import Records
from pagetest.results.result import NONE, PASS, Result
from pagetest.run.device import Device

_PACKAGES = ("torch", "numpy", "transformers")
_USER_FOLDER = "/home/user"
_GENERIC_NAMES = ("", "localhost", "root", "user", "host")
"""Names that identify no machine, and that occur in many texts."""


@dataclass(frozen=True)
class Recorder:
    """Records the results of one run."""

    records: Records
    device: Device
    root: Path
    facts: Mapping[str, Any]
    published: Records | None = None  # where what passed is kept too; None for nowhere

    def add(self, result: Result) -> None:
        """Records a result at once, so that it survives an interruption."""
        for records in filter(None, (self.records, self.published)):
            if result.status == NONE:
                records.remove(result.language, result.name)
            elif records is self.records or not result.is_failed:
                records.write(self.make_record(result), {figure.name: figure.content for figure in _figures(result)})

    def make_record(self, result: Result) -> dict[str, Any]:
        """The record of a result; a failure counts for the device that the page should have run on."""
        record = {**result.as_json(), **self.facts}
        if result.is_failed:
            record["device"] = self.device.requested or result.device or self.device.expected
        if result.status == PASS:
            record["blocks"] = self._blocks(result)
            record["warnings"] = [{"line": one.line, "message": one.message} for one in result.warnings]
        return record

    def _blocks(self, result: Result) -> list[dict[str, Any]]:
        """What each block printed, Python on rank 0, and the figures that it drew."""
        assert result.log, "a page that passed has run"
        figures, page = _figures(result), result.path.read_text(encoding="utf-8")
        return [
            {
                "printed": remove_private_names(text, self.root, result.log.parent, page),
                "figures": [figure.name for figure in figures if figure.line == line],
            }
            for line, text in result.printed.items()
        ]


def run_facts(root: Path, device: str = "") -> dict[str, Any]:
    """What the results of a run that begins now hold for: date, commit, processor, versions, common files."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(root),
        "processor": _processor(),
        "versions": versions(),
        "inputs": common_inputs(root, device),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide what pages print."""
    found = {package: _version(package) for package in _PACKAGES}
    return {"python": platform.python_version()} | {package: number for package, number in found.items() if number}


def _figures(result: Result) -> tuple[Any, ...]:
    """The figures of a run; a result that reuses the run of another page has its figures."""
    return result.figures if result.status == PASS else ()


def _commit(root: Path) -> str:
    """The commit that is tested, with a mark if the tree holds changes; empty outside a repository."""
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _processor() -> str:
    """The name of the processor, as its maker gives it where the system knows it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def remove_private_names(text: str, root: Path, folder: Path, page: str) -> str:
    """The text as it would be on a reader's machine."""
    # A word of the page's own text, such as the `vm` of a formula, names no machine.
    for name, replacement in _replacements(root, folder).items():
        text = text.replace(name, replacement)
    for name, replacement in ((platform.node(), "host"), (_user(), "user")):
        word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
        if name not in _GENERIC_NAMES and not word.search(page):
            text = word.sub(replacement, text)
    return text


def _replacements(root: Path, folder: Path) -> Mapping[str, str]:
    """The replacement for each path, the longest first: one may be inside another."""
    places = {
        folder: f"{_USER_FOLDER}/tutorial",
        Path(sys.prefix): f"{_USER_FOLDER}/venv",
        Path(sys.base_prefix): "/usr",
        root: f"{_USER_FOLDER}/colossal",
        Path.home(): _USER_FOLDER,
    }
    known = {str(path): text for path, text in places.items() if len(path.parts) > 1}
    return dict(sorted(known.items(), key=lambda item: -len(item[0])))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return ""
