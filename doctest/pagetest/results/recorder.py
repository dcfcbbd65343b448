"""The recorder: enters results into a file, with what they hold for."""

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagetest.results.result import Result
from pagetest.results.results_file import ResultsFile
from pagetest.run.device import Device


@dataclass(frozen=True)
class Recorder:
    """Enters the results of one run.

    Attributes:
        file: Where to.
        device: The device of the run.
        facts: What all results of the run share.
    """

    file: ResultsFile
    device: Device
    facts: Mapping[str, str]

    def enter(self, result: Result) -> None:
        """Enters a result at once, so that what was learnt outlives an interruption."""
        self.file.enter([self.entry(result)])

    def entry(self, result: Result) -> dict[str, Any]:
        """The entry of a result; a failure counts for the device that the page should have run on."""
        entry = {**result.as_json(), **self.facts}
        if result.is_failed:
            entry["device"] = self.device.asked or result.device or self.device.expected
        return entry


def run_facts(root: Path) -> dict[str, str]:
    """What the results of a run that begins now hold for: date, commit, Python and torch."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(root),
        "python": platform.python_version(),
        "torch": _torch_version(),
    }


def _commit(root: Path) -> str:
    """The commit that is tested, with a mark if the tree holds changes; empty outside a repository."""
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
