"""No test file is so long that one worker still runs it when the other has nothing left.

``tests/durations.json`` holds the seconds of every unit of tests: a file, or a group of its tests. To write it anew, on
a machine that does nothing else: ``nox -s tests -- -n 3 --dist loadfile --store-durations``.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from durations import SPLIT, read_durations, read_units, unit_of, write_units

CEILING_SECONDS = 40

LONG_UNITS: dict[str, str] = {}  # unit -> why one worker has to run all of it


def long_units(units: Mapping[str, float], allowed: Mapping[str, str]) -> Iterator[str]:
    for unit, seconds in units.items():
        if seconds > CEILING_SECONDS and unit not in allowed:
            yield f"{unit} takes {seconds:.0f} s, more than {CEILING_SECONDS}: split it, or group its tests by fixture"


def stale_allowances(units: Mapping[str, float], allowed: Mapping[str, str]) -> Iterator[str]:
    for unit, reason in allowed.items():
        if not reason.strip():
            yield f"{unit} is allowed to take long without a reason"
        if units.get(unit, 0) <= CEILING_SECONDS:
            yield f"{unit} no longer needs its place in the allow-list"


def gone(units: Mapping[str, float], root: Path) -> Iterator[str]:
    for unit in units:
        if not (root / unit.partition("@")[0]).is_file():
            yield f"{unit} is gone: remove its line from tests/durations.json"


# ------------------------------------------------------------------------------------------ the repository


def test_no_unit_takes_too_long() -> None:
    violations = list(long_units(read_units(), LONG_UNITS))
    assert not violations, "\n".join(violations)


def test_every_allowance_is_needed() -> None:
    violations = list(stale_allowances(read_units(), LONG_UNITS))
    assert not violations, "\n".join(violations)


def test_every_stored_unit_exists(repository: Path) -> None:
    violations = list(gone(read_units(), repository))
    assert not violations, "\n".join(violations)


# ------------------------------------------------------------------------------------------ the guard itself


@pytest.mark.parametrize(
    ("units", "allowed", "found"),
    [
        ({"tests/a.py": 40.0}, {}, 0),
        ({"tests/a.py": 40.1}, {}, 1),
        ({"tests/a.py@one": 30.0, "tests/a.py@other": 30.0}, {}, 0),
        ({"tests/a.py": 50.0}, {"tests/a.py": "one fixture"}, 0),
    ],
)
def test_finds_a_long_unit(units, allowed, found) -> None:
    assert len(list(long_units(units, allowed))) == found


def test_finds_a_stale_allowance() -> None:
    assert not list(stale_allowances({"a.py": 50.0}, {"a.py": "one fixture"}))
    assert len(list(stale_allowances({"a.py": 50.0, "b.py": 10.0}, {"a.py": " ", "b.py": "x", "c.py": "x"}))) == 3


def test_finds_a_file_that_is_gone(tmp_path) -> None:
    (tmp_path / "a.py").touch()
    assert list(gone({"a.py@one": 1.0, "b.py": 1.0}, tmp_path)) == [
        "b.py is gone: remove its line from tests/durations.json"
    ]


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/a.py::test", "tests/a.py"),
        ("tests/a.py::Test::test[x]", "tests/a.py"),
        ("tests/b.py::test[x-1]", "tests/b.py@x"),
        ("tests/b.py::Test::test[y]", "tests/b.py@y"),
        ("tests/b.py::test", "tests/b.py"),
    ],
)
def test_the_unit_of_a_test_is_its_file_or_what_it_shares_there(nodeid, unit, monkeypatch) -> None:
    monkeypatch.setitem(SPLIT, "tests/b.py", r"\[(\w+)")
    assert unit_of(nodeid) == unit


def test_a_run_of_some_files_keeps_the_durations_of_the_others(tmp_path) -> None:
    store = tmp_path / "durations.json"
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    store.write_text(json.dumps({"a.py": 1.0, "b.py@old": 2.0, "gone.py": 3.0}))
    write_units({"b.py@one": 4.04, "b.py@other": 5.0}, tmp_path, store)
    assert read_units(store) == {"a.py": 1.0, "b.py@one": 4.0, "b.py@other": 5.0}
    assert read_durations(store) == {"a.py": 1.0, "b.py": 9.0}


CONFTEST = """
import durations
from pathlib import Path

store = Path(__file__).with_name("durations.json")
durations.read_units.__defaults__ = durations.write_units.__defaults__ = (store,)
durations.SPLIT["test_groups.py"] = r"\\[(.)"

def pytest_addoption(parser):
    parser.addoption("--store-durations", action="store_true")

def pytest_configure(config):
    config.pluginmanager.register(durations.Durations(config))
"""
QUICK = "def test_1(): ...\ndef test_2(): ...\n"
GROUPS = """
import pytest, time

@pytest.fixture(scope="module", params=["x", "y"])
def made(request):
    time.sleep(0.3)

def test_1(made): ...
def test_2(made): ...
def test_3(): ...
"""


def test_workers_run_the_longest_first_and_store_how_long_it_took(tmp_path, monkeypatch) -> None:
    for name, text in {"conftest.py": CONFTEST, "test_quick.py": QUICK, "test_groups.py": GROUPS}.items():
        (tmp_path / name).write_text(text)
    store = tmp_path / "durations.json"
    store.write_text(json.dumps({"test_quick.py": 9.0, "test_groups.py": 1.0, "test_groups.py@y": 5.0}))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"))
    options = ["-n", "1", "--dist", "loadfile", "--store-durations", "-v", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    order = [line.split()[-1] for line in done.stdout.splitlines() if "PASSED" in line]
    groups = "test_groups.py::test_"
    assert order == [
        *(f"{groups}{number}[x]" for number in (1, 2)),  # without a duration: first
        *(f"test_quick.py::test_{number}" for number in (1, 2)),
        *(f"{groups}{number}[y]" for number in (1, 2)),
        f"{groups}3",
    ], done.stdout + done.stderr
    units = read_units(store)
    assert units.keys() == {"test_quick.py", "test_groups.py", "test_groups.py@x", "test_groups.py@y"}
    assert min(units["test_groups.py@x"], units["test_groups.py@y"]) >= 0.3
