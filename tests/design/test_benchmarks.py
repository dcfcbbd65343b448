"""Every benchmark has a size at which it is run before a release."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "smoke.py"
_SPEC = importlib.util.spec_from_file_location("smoke", PROGRAM)
assert _SPEC
assert _SPEC.loader
smoke = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(smoke)


def test_every_benchmark_is_in_the_table() -> None:
    assert {path.stem for path in PROGRAM.parent.glob("*.py")} == set(smoke.SMOKE) | smoke.LIBRARIES


def test_a_benchmark_that_fails_is_told_with_what_it_said(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "good.py").write_text("import sys\nassert sys.argv[1:] == ['--turns', '1']\n")
    (tmp_path / "bad.py").write_text("raise AssertionError('ours differs from theirs')\n")
    monkeypatch.setattr(smoke, "HERE", tmp_path)
    monkeypatch.setattr(smoke, "SMOKE", {"good": smoke.Smoke("--turns 1"), "bad": smoke.Smoke()})
    monkeypatch.setattr(sys, "argv", ["smoke.py"])
    assert smoke.main() == 1
    said = capsys.readouterr().out
    assert said.startswith("ok   good ")
    assert "\nFAIL bad " in said
    assert "ours differs from theirs" in said


def test_a_name_of_nothing_is_refused() -> None:
    done = subprocess.run([sys.executable, PROGRAM, "zeros"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Found zeros. Choose from adam_step, booster_overhead" in done.stderr
