"""The files in ``changes/`` are what the changelog will say."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KINDS = {
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
}
FRAGMENTS = sorted(path for path in (ROOT / "changes").glob("*") if path.name != "README.md")


def towncrier(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "towncrier", "build", "--version", "9.9.9", "--date", "2030-01-01", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what towncrier reads."""
    shutil.copytree(ROOT / "changes", tmp_path / "changes")
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_every_file_has_a_kind() -> None:
    assert all(path.name.split(".")[1] in KINDS and path.suffix == ".md" for path in FRAGMENTS), FRAGMENTS
    table = (ROOT / "changes" / "README.md").read_text(encoding="utf-8")
    assert {kind for kind in KINDS if f"| `{kind}` |" in table} == KINDS


def test_the_draft_says_what_the_files_say() -> None:
    draft = " ".join(towncrier(ROOT, "--draft").split())
    assert "## 9.9.9 (2030-01-01)" in draft
    for path in FRAGMENTS:
        assert " ".join(path.read_text(encoding="utf-8").split()) in draft, path


def test_a_release_stands_above_the_ones_before(project: Path) -> None:
    (project / "changes" / "12345.fix.md").write_text("Planted.\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    towncrier(project, "--yes")
    text = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.index("- Planted. (#12345)") > text.index("## 9.9.9 (2030-01-01)")
    assert text.index("## 9.9.9 (2030-01-01)") < text.index("## Before the first release")
    assert [path.name for path in (project / "changes").iterdir()] == ["README.md"]
