"""The last lines of the gate say what refuses a change."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "nox > what failed runs once more, alone\n"
FIRST = "FAILED tests/test_a.py::test_one - assert 1 == 2\nFAILED tests/test_a.py::test_two - Timeout\n"
FAILED_TWICE = f"{FIRST}=== 2 failed, 98 passed in 5.00s ===\n{AGAIN}FAILED tests/test_a.py::test_one - assert 1 == 2\n"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    pytest.importorskip("nox")
    spec = importlib.util.spec_from_file_location("gate", ROOT / "tests" / "gate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "log", "reasons"),
    [
        ("tests", FIRST, [line.strip() for line in FIRST.splitlines()]),
        (
            "tests",
            FAILED_TWICE + "=== 1 failed, 1 passed in 1s ===\n",
            ["FAILED tests/test_a.py::test_one - assert 1 == 2"],
        ),
        ("style", "src/a.py:1:8: F401 unused\nnox > failed\n", ["src/a.py:1:8: F401 unused"]),
        ("style", "Would reformat: src/a.py\n1 file would be reformatted\n", ["Would reformat: src/a.py"]),
        ("types", f"{ROOT}/src/a.py\n  {ROOT}/src/a.py:3:1 - error: no\n1 error\n", ["src/a.py:3:1 - error: no"]),
        ("rules", "docs/source/en/a.md:3: no such link\n", ["docs/source/en/a.md:3: no such link"]),
        ("pages", "a   FAIL\nFAIL  docs_test.py a --lang en  # why\n", ["FAIL  docs_test.py a --lang en  # why"]),
        ("tests", "INTERNALERROR> at the end\nnox > failed\n", ["INTERNALERROR> at the end"]),
    ],
)
def test_reasons_are_found(gate, name, log, reasons) -> None:
    assert gate.Outcome(name, 1, 1.0, log).reasons == reasons


def test_the_end_fits_into_forty_lines_and_has_every_reason(gate, capsys) -> None:
    late = gate.Outcome("pages", None, 1560.0, "page one\npage two\n")
    many = "".join(f"FAILED tests/test_a.py::test_{number} - why\n" for number in range(40))
    gate.tell([gate.Outcome("style", 0, 2.0, ""), gate.Outcome("tests", 1, 99.0, f"{many}40 failed, 5 passed"), late])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert lines[-1] == "GATE REFUSED: tests, pages"
    assert "tests: 5 passed, 40 failed" in lines
    assert "tests REFUSED, again: .venv/bin/nox -R -s tests" in lines
    assert "  no end after 26 minutes; the last lines:" in lines
    assert "  and 27 more in build/gate/tests.log" in lines


def test_what_passed_alone_is_named_and_refuses_nothing(gate, capsys) -> None:
    flaky = "nox > flaky, passed when run alone: tests/test_a.py::test_one"
    log = f"{FIRST}=== 1 failed, 98 passed in 5s ===\n{AGAIN}=== 1 passed in 1s ===\n{flaky}\n"
    gate.tell([gate.Outcome("tests", 0, 9.0, log)])
    lines = capsys.readouterr().out.splitlines()
    assert flaky in lines
    assert lines[-2:] == ["tests: 98 passed, 0 failed", "GATE PASSED"]
