"""`python docs_build.py api` as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagebuild import cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


BOOSTER = '''"""What trains."""

__all__ = ["Booster"]


class Booster:
    """Trains a model.

    Example:
        >>> isinstance(Booster(), Booster)
        True
    """
'''


def docs_build(*arguments: object, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "docs_build.py", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=300)


def test_an_unknown_hook_fails_the_build_and_the_rest_is_written(tmp_path) -> None:
    (tmp_path / "docs_build.py").write_bytes((ROOT / "docs_build.py").read_bytes())
    (tmp_path / "doctest").symlink_to(ROOT / "doctest")
    package = tmp_path / "src" / "colossal"
    (package / "booster").mkdir(parents=True)
    (package / "__init__.py").write_text('"""A library."""\n\n__all__ = []\n', encoding="utf-8")
    (package / "booster" / "__init__.py").write_text(BOOSTER, encoding="utf-8")
    page = tmp_path / "docs" / "source" / "zh-Hans" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("# 页\n\n{{ autodoc:colossal.booster.Boster }}\n", encoding="utf-8")
    done = docs_build("api", root=tmp_path)
    assert done.returncode == 1, done.stderr
    finding, summary = done.stdout.splitlines()
    assert finding.startswith(f"{page.relative_to(tmp_path)}:3: `colossal.booster.Boster` is not in the API reference")
    assert "the nearest: colossal.booster.Booster" in finding
    assert summary.endswith("1 finding")
    content = json.loads((tmp_path / "build" / "docs" / "api.json").read_text(encoding="utf-8"))
    assert content["objects"]["colossal.booster.Booster"]["kind"] == "class"


def test_a_wrong_call_says_what_there_is() -> None:
    done = docs_build("nothing")
    assert done.returncode == 2
    assert "api" in done.stderr
    assert "sphinx" in done.stderr


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, capsys) -> None:
    emitter = cli.Subcommand("gone", "nothing", "api", ("no_such_package_at_all", "json"))
    monkeypatch.setitem(cli.SUBCOMMANDS, "gone", emitter)
    assert cli.main(["gone"], ROOT) == cli.USAGE
    message = capsys.readouterr().err
    assert "needs the package no_such_package_at_all," in message
    assert "nox -s api" in message
