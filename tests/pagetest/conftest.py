"""A temporary documentation tree, and the ways to run it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetest import cli
from pagetest.limits import scaled
from pagetest.model.page import Page
from pagetest.model.reader import parse_page
from pagetest.results.records import Records

ROOT = Path(__file__).resolve().parents[2]
CODE_LINE = 5


@dataclass(frozen=True)
class Docs:
    """A tree below a temporary folder; `code` starts at line 5 of every page it makes."""

    source: Path

    def write(self, name: str, text: str, *languages: str) -> None:
        for language in languages or ("en", "zh-Hans"):
            path = self.source / language / f"{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def add(self, name: str, code: str, command: str = "", languages: tuple[str, ...] = ("en", "zh-Hans")) -> None:
        self.write(name, self.markdown(name, code, command), *languages)

    @staticmethod
    def markdown(name: str, code: str, command: str = "") -> str:
        command = command or f"python {name.rpartition('/')[2]}.py"
        return f"# Title\n\nText.\n```python\n{code.strip()}\n```\n\n<!-- doc-test-command: {command} -->\n"

    @property
    def build(self) -> Path:
        return self.source.parent / "build" / "pages"

    @property
    def records(self) -> Records:
        """What the last runs left."""
        return Records(self.source.parent / "build" / "verified")

    @property
    def published(self) -> Records:
        """What was recorded to be committed."""
        return Records(self.source.parent / "verified")

    def arguments(self, *words: str) -> list[str]:
        return [*words, "--source", str(self.source), "--build", str(self.build)]

    def run(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the front door in a process of its own."""
        command = [sys.executable, str(ROOT / "docs_test.py"), *self.arguments(*words)]
        limit = scaled(600)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=env)

    def main(self, *words: str) -> int:
        """Runs the command line in this process; for what starts no page."""
        return cli.main(self.arguments(*words), ROOT)


@pytest.fixture
def docs(tmp_path: Path) -> Docs:
    return Docs(tmp_path / "source")


@pytest.fixture
def parse() -> Callable[..., Page]:
    def parse(text: str, name: str = "lesson", language: str = "en") -> Page:
        return parse_page(text, Path(f"{name}.md"), language, name)

    return parse
