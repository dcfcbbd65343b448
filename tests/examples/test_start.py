"""Each program starts by its path and as a module, whatever the working directory."""

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for path in ROOT.glob("examples/*/*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _only_installed_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a new process elsewhere: what other tests imported of `examples` is not found."""
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "examples"}
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in {"", str(ROOT)}])
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "examples"]:
        del sys.modules[name]
    sys.modules.update(known)


def start(how: str, program: Path) -> None:
    if how == "path":
        runpy.run_path(str(program), run_name="__main__")
    else:
        name = ".".join(program.relative_to(ROOT).with_suffix("").parts)
        runpy.run_module(name, run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.parametrize("how", ["path", "module"])
def test_a_program_starts(how: str, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(program.parent if how == "path" else ROOT))  # as Python does
    with pytest.raises(SystemExit, match="0"):
        start(how, program)
    assert "--output" in capsys.readouterr().out


def test_no_program_is_left_out() -> None:
    assert {path.parent.name for path in PROGRAMS} == {"finetune", "pretrain"}
