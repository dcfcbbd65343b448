"""Small pages, and the ways to make notebooks of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from pagebuild.notebook.builder import BuiltNotebook, NotebookBuilder
from pagebuild.notebook.page_notebook import build_notebook
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.reader import parse_page
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.results.recorder import Recorder, run_facts
from pagetest.results.records import Records
from pagetest.results.result import Result
from pagetest.results.run_finder import RunFinder
from pagetest.run.device import Device
from pagetest.run.runner import Runner
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
    """A tree below a temporary folder, and the languages of the pages that the harness ran."""

    folder: Path
    ran: list[str] = field(default_factory=list)

    def write(self, name: str, text: str, *languages: str) -> None:
        for language in languages or LANGUAGES:
            path = self.folder / "source" / language / f"{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    @property
    def records(self) -> Records:
        return Records(self.folder / "build" / "verified")

    def builder(self, *executed: str, limit_seconds: float = 60.0) -> NotebookBuilder:
        tree, device, now = Tree(self.folder / "source"), Device("cpu"), run_facts(ROOT)
        suite = Suite(tree, LANGUAGES, ROOT / "src")
        runner = Runner(ROOT, self.folder / "build" / "pages", limit_seconds)
        recorder = Recorder(self.records, device, ROOT, now)

        def run_page(page: Page) -> Result:
            self.ran.append(page.language)
            result = suite.run_page(page, runner)
            recorder.add(result)
            return result

        fitting = RunFinder([self.records], tree, ImportGraph(ROOT / "src"), "cpu", now)
        folder, chosen = self.folder / "notebooks", frozenset(executed)
        return NotebookBuilder(ROOT, suite, OBJECTS, folder, limit_seconds, fitting, run_page, chosen)

    def make(self, name: str, limit_seconds: float = 60.0, *, execute: bool = False) -> list[BuiltNotebook]:
        return list(self.builder(*([name] if execute else []), limit_seconds=limit_seconds).build_page(name))

    def notebook(self, language: str, name: str = "lesson") -> NotebookNode:
        return nbformat.read(self.folder / f"notebooks/{language}/{name}.ipynb", as_version=4)


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
