"""What an import costs, counted in fresh interpreters, and which libraries it must leave alone.

Lines of Python are counted, not seconds: a machine with other work to do takes twice as long over the same lines.
``benchmarks/import_cost.py`` measures the seconds, of which at most 0.1 are meant to be spent on either import.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LIMIT_LINES = {"import colossal": 3_000, "import colossal.booster": 100_000}  # run after ``import torch``

HEAVY = ("transformers", "sklearn", "matplotlib", "scipy", "torch")
OPTIONAL = (
    "click",
    "markdown_it",
    "matplotlib",
    "psutil",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "transformers",
)


def run(program: str, path: Path) -> str:
    """The output of a program in a fresh interpreter that finds modules in ``path`` first."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": ""}  # compiling is no import
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COUNTING = """
import sys
{base}
lines = 0
def count(frame, event, argument):
    global lines
    lines += event == "line"
    return count
sys.settrace(count)
{statement}
sys.settrace(None)
print(lines)
"""


def lines_run(statement: str, path: Path, base: str = "import torch") -> int:
    """How many lines of Python ``statement`` runs after ``base``, those of other libraries included."""
    return int(run(COUNTING.format(base=base, statement=statement), path))


def loaded(statement: str, names: tuple[str, ...], path: Path) -> list[str]:
    """Which of ``names`` are imported by ``statement``."""
    return run(f"import sys\n{statement}\nprint(*sorted(set({names!r}) & sys.modules.keys()))", path).split()


# ------------------------------------------------------------------------------------------ the library


@pytest.mark.parametrize("statement", LIMIT_LINES)
def test_costs_little_over_importing_torch(statement: str, library: Path) -> None:
    run(statement, library.parent)  # the bytecode is there then, and nothing is built
    assert lines_run(statement, library.parent) <= LIMIT_LINES[statement]


def test_the_front_door_imports_nothing_heavy(library: Path) -> None:
    assert loaded("import colossal", HEAVY, library.parent) == []


@pytest.mark.parametrize("module", ["colossal.booster", "colossal.checkpoint_io", "colossal.nn.lr_scheduler"])
def test_optional_libraries_are_imported_where_they_are_used(module: str, library: Path) -> None:
    assert loaded(f"import {module}", OPTIONAL, library.parent) == []


# ------------------------------------------------------------------------------------------ the guard itself


def test_finds_a_slow_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("total = 0\nfor i in range(100_000):\n    total += i\n", encoding="utf-8")
    (tmp_path / "quick.py").write_text("import slow_one_function_away\n", encoding="utf-8")
    (tmp_path / "slow_one_function_away.py").write_text("def f():\n    import slow\n", encoding="utf-8")
    assert lines_run("import slow", tmp_path, base="import json") > 200_000
    assert lines_run("import quick", tmp_path, base="import json") < 5_000


def test_finds_an_optional_library(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("", encoding="utf-8")
    (tmp_path / "eager.py").write_text("import click\n", encoding="utf-8")
    (tmp_path / "lazy.py").write_text("def f():\n    import click\n", encoding="utf-8")
    assert loaded("import eager", OPTIONAL, tmp_path) == ["click"]
    assert loaded("import lazy", OPTIONAL, tmp_path) == []


def test_a_program_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_module"):
        run("import no_such_module", tmp_path)
