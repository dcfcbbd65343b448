"""Small pages, and the ways to make notebooks of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nbformat import NotebookNode

from pagebuild.notebook.build import build_notebook
from pagebuild.notebook.workshop import Made, Workshop
from pagetest.model.page import Page
from pagetest.model.reader import parse_page
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.suite import Suite

ROOT = Path(__file__).resolve().parents[3]
THING = {
    "name": "pack.thing",
    "signature": [
        {"name": "size", "kind": "positional_or_keyword", "type": "int", "default": None},
        {"name": "rest", "kind": "var_positional", "type": "int", "default": None},
        {"name": "name", "kind": "keyword_only", "type": "str", "default": '"x"'},
        {"name": "more", "kind": "var_keyword", "type": "int", "default": None},
    ],
    "body": [{"type": "paragraph", "children": [{"type": "text", "value": "Make a thing."}]}],
}
OBJECTS: dict[str, dict[str, Any]] = {
    "pack.thing": THING,
    "pack.THINGS": {"name": "pack.THINGS", "signature": None, "body": []},
}


@dataclass(frozen=True)
class Pages:
    """A tree below a temporary folder."""

    folder: Path

    def write(self, name: str, text: str, *languages: str) -> None:
        for language in languages or LANGUAGES:
            path = self.folder / "source" / language / f"{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def workshop(self, limit_seconds: float = 60.0) -> Workshop:
        suite = Suite(Tree(self.folder / "source"), LANGUAGES, ROOT / "src")
        return Workshop(ROOT, suite, OBJECTS, self.folder / "notebooks", limit_seconds)

    def make(self, name: str, limit_seconds: float = 60.0) -> list[Made]:
        return list(self.workshop(limit_seconds).make(name))


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    return Pages(tmp_path)


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., Page]:
    def parse(text: str, command: str = "python lesson.py", language: str = "en") -> Page:
        text = f"{text.strip()}\n\n<!-- doc-test-command: {command} -->\n"
        return parse_page(text, tmp_path / "lesson.md", language, "lesson")

    return parse


@pytest.fixture
def build(parse) -> Callable[..., NotebookNode]:
    """Makes the notebook of a page's text."""
    return lambda *arguments, **options: build_notebook(parse(*arguments, **options), OBJECTS, {})
