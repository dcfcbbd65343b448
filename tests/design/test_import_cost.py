"""What an import costs, measured in fresh interpreters, and which libraries it must leave alone."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_SECONDS = 0.100  # of processor time over importing torch; a busy machine does not change it much
ROUNDS = 5

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
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds_of(statements: str, path: Path) -> float:
    program = f"import time\nstart = time.process_time()\n{statements}\nprint(time.process_time() - start)"
    return float(run(program, path))


def extra_seconds(statement: str, path: Path, rounds: int = ROUNDS, base: str = "import torch") -> float:
    """What ``statement`` costs after ``base``: the median over pairs measured one after the other."""
    seconds_of(f"{base}\n{statement}", path)  # the first run compiles and reads from the disk
    pairs = [(seconds_of(base, path), seconds_of(f"{base}\n{statement}", path)) for _ in range(rounds)]
    return statistics.median([with_it - without for without, with_it in pairs])


def loaded(statement: str, names: tuple[str, ...], path: Path) -> list[str]:
    """Which of ``names`` are imported by ``statement``."""
    return run(f"import sys\n{statement}\nprint(*sorted(set({names!r}) & sys.modules.keys()))", path).split()


# ------------------------------------------------------------------------------------------ the library


@pytest.mark.parametrize("statement", ["import colossal", "import colossal.booster"])
def test_costs_little_over_importing_torch(statement: str, library: Path) -> None:
    cost = extra_seconds(statement, library.parent)
    if cost > LIMIT_SECONDS:  # other programs may have run meanwhile: judge by more pairs
        cost = extra_seconds(statement, library.parent, rounds=3 * ROUNDS)
    assert cost <= LIMIT_SECONDS, f"{statement} costs {cost * 1000:.0f} ms over importing torch"


def test_the_front_door_imports_nothing_heavy(library: Path) -> None:
    assert loaded("import colossal", HEAVY, library.parent) == []


@pytest.mark.parametrize("module", ["colossal.booster", "colossal.checkpoint_io", "colossal.nn.lr_scheduler"])
def test_optional_libraries_are_imported_where_they_are_used(module: str, library: Path) -> None:
    assert loaded(f"import {module}", OPTIONAL, library.parent) == []


# ------------------------------------------------------------------------------------------ the guard itself


def test_finds_a_slow_import(tmp_path: Path) -> None:
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end:\n    pass\n"
    (tmp_path / "slow.py").write_text(busy, encoding="utf-8")
    (tmp_path / "quick.py").write_text("", encoding="utf-8")
    assert extra_seconds("import slow", tmp_path, rounds=1, base="import json") > LIMIT_SECONDS
    assert extra_seconds("import quick", tmp_path, rounds=3, base="import json") < LIMIT_SECONDS


def test_finds_an_optional_library(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("", encoding="utf-8")
    (tmp_path / "eager.py").write_text("import click\n", encoding="utf-8")
    (tmp_path / "lazy.py").write_text("def f():\n    import click\n", encoding="utf-8")
    assert loaded("import eager", OPTIONAL, tmp_path) == ["click"]
    assert loaded("import lazy", OPTIONAL, tmp_path) == []


def test_a_program_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_module"):
        run("import no_such_module", tmp_path)
