"""What an import costs, measured in fresh interpreters, and which libraries it must leave alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_SECONDS = 0.100  # of processor time over importing torch
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


def extra_seconds(statement: str, path: Path, base: str = "import torch") -> float:
    """Processor time of ``statement`` after ``base``: the least of several interpreters, as others only add to it."""
    timed = f"import time\n{base}\nstart = time.process_time()\n{statement}\nprint(time.process_time() - start)"
    return min(float(run(timed, path)) for _ in range(ROUNDS))


def loaded(statement: str, names: tuple[str, ...], path: Path) -> list[str]:
    """Which of ``names`` are imported by ``statement``."""
    return run(f"import sys\n{statement}\nprint(*sorted(set({names!r}) & sys.modules.keys()))", path).split()


# ------------------------------------------------------------------------------------------ the library


@pytest.mark.parametrize("statement", ["import colossal", "import colossal.booster"])
def test_costs_little_over_importing_torch(statement: str, library: Path) -> None:
    cost = extra_seconds(statement, library.parent)
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
    assert extra_seconds("import slow", tmp_path, base="import json") > LIMIT_SECONDS
    assert extra_seconds("import quick", tmp_path, base="import json") < LIMIT_SECONDS


def test_finds_an_optional_library(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("", encoding="utf-8")
    (tmp_path / "eager.py").write_text("import click\n", encoding="utf-8")
    (tmp_path / "lazy.py").write_text("def f():\n    import click\n", encoding="utf-8")
    assert loaded("import eager", OPTIONAL, tmp_path) == ["click"]
    assert loaded("import lazy", OPTIONAL, tmp_path) == []


def test_a_program_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_module"):
        run("import no_such_module", tmp_path)
