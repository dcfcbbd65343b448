# pyright: reportArgumentType=false
"""How long tests take, stored, so that the longest start first and two workers end at the same time.

A unit is what one worker runs from its start to its end: a test file, or where a file takes long, some of its tests.
Those that share an expensive fixture stay together: a fixture of a module is computed again for each unit.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_FUNCTION, _PARAMETERS, _EACH = r"^(\w+)", r"\[([\w-]+)\]", r"^(.+)$"

SPLIT: dict[str, str] = {
    "tests/booster/test_equality_matrix.py": r"is_one_process\[([\w ,.]+)",
    "tests/booster/test_equality_transformers.py": r"is_one_process\[([\w ,.]+)",
    "tests/booster/test_gold_rule.py": r"\[(DDP|FSDP|ZeRO-1|ZeRO-2|Gemini)-",
    "tests/booster/test_gemini.py": r"^(test_any_world_goes_on|test_parts_are_saved)",
    "tests/booster/test_hybrid_checkpoints.py": r"^(test_\w*(?:every_plugin|killed|sequences|shared)\w*)",
    "tests/booster/test_hybrid_lora.py": _PARAMETERS,
    "tests/booster/test_hybrid_parallel.py": _PARAMETERS,
    "tests/booster/test_lora_files.py": _PARAMETERS,
    "tests/checkpoint_io/test_killed.py": _PARAMETERS,
    "tests/checkpoint_io/test_universal.py": _PARAMETERS,
    "tests/cli/benchmark/test_command.py": _FUNCTION,
    "tests/cli/check/test_command.py": _FUNCTION,
    "tests/cli/check/test_selftest.py": _FUNCTION,
    "tests/cli/run/test_failures.py": _EACH,
    "tests/cli/run/test_nodes.py": _FUNCTION,
    "tests/lazy/test_divided.py": r"^test_all_ranks.*\[([\w-]+)\]",
    "tests/pagebuild/notebook/test_execute.py": _FUNCTION,
    "tests/pagebuild/sphinx/test_site.py": r"^(test_every_fault|test_a_check)",
    "tests/pagetest/test_cheats.py": r"^(test_the_rank_that_hangs)",
    "tests/pagetest/test_pytest_plugin.py": _FUNCTION,
    "tests/pagetest/test_warm.py": r"\[(alone|ranks)\b",
    "tests/shardformer/test_sequence.py": _PARAMETERS,
}
"""Long files, and the part of a test's name that says which tests share a fixture; the others are one unit more."""

STORE = Path(__file__).resolve().parents[1] / "durations.json"


def read_units(store: Path = STORE) -> dict[str, float]:
    """Return the seconds of every unit."""
    return json.loads(store.read_text(encoding="utf-8"))


def read_durations(store: Path = STORE) -> dict[str, float]:
    """Return the seconds of every test file, by its path from the root of the project."""
    files: Counter[str] = Counter()
    for unit, seconds in read_units(store).items():
        files[unit.partition("@")[0]] += seconds
    return dict(files)


def write_units(measured: Mapping[str, float], root: Path, store: Path = STORE) -> None:
    """Store the seconds of units; the other units of their files, and files that are gone, are forgotten."""
    again = {unit.partition("@")[0] for unit in measured}
    kept = {unit: seconds for unit, seconds in read_units(store).items() if unit.partition("@")[0] not in again}
    units = {unit: round(seconds, 1) for unit, seconds in {**kept, **measured}.items()}
    there = {unit: units[unit] for unit in sorted(units) if (root / unit.partition("@")[0]).is_file()}
    store.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")


def unit_of(nodeid: str) -> str:
    """Return the unit of a test."""
    file, _, test = nodeid.partition("::")
    group = re.search(SPLIT[file], test) if file in SPLIT else None
    return f"{file}@{group[1]}" if group else file


class ByDuration(LoadScopeScheduling):
    """Gives whole units to workers, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


class Durations:
    """Orders the units of workers, the longest first, and stores how long they took for ``--store-durations``."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: Counter[str] = Counter()
        config.option.loadscopereorder = False  # by the number of tests

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ByDuration | None:
        """Take the place of xdist's own scheduler."""
        return ByDuration(config, log) if config.getoption("dist") == "loadfile" else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order the tests of a worker; every worker does the same."""
        if hasattr(self.config, "workerinput"):
            units, unknown = read_units(), float("inf")
            items.sort(key=lambda item: -units.get(unit_of(item.nodeid), unknown))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up setup, call and teardown."""
        self.seconds[unit_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Store what was measured, in the process that has all of it; workers that share a core work half the time."""
        if self.config.getoption("store_durations") and not hasattr(self.config, "workerinput"):
            share = min(1.0, (os.cpu_count() or 1) / (self.config.getoption("numprocesses") or 1))
            write_units({unit: seconds * share for unit, seconds in self.seconds.items()}, self.config.rootpath)
