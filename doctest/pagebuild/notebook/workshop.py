"""Makes and executes the notebooks of a tree of pages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from pagebuild.notebook.build import build_notebook
from pagebuild.notebook.execute import Execution, execute
from pagebuild.notebook.failure import Failure
from pagebuild.notebook.kind import NOTHING, kind_of
from pagebuild.notebook.sharing import with_outputs_of
from pagebuild.site.downloads import origin
from pagetest.checks.parity import compare
from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.results.result import FAIL, NONE, PASS, SAME
from pagetest.suite import Suite


@dataclass(frozen=True)
class Made:
    """What became of one notebook.

    Attributes:
        page: Its page.
        status: PASS; SAME (its original was executed, with the same code); NONE (nothing to execute); FAIL.
        note: What the report adds to a status without an execution.
        execution: How it went.
        findings: What forbade to make it.
    """

    page: Page
    status: str
    note: str = ""
    execution: Execution | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def failure(self) -> Failure | None:
        """Why the execution failed."""
        return self.execution.failure if self.execution else None


@dataclass(frozen=True)
class Workshop:
    """Makes notebooks.

    Attributes:
        root: The project's root.
        suite: The pages.
        objects: The documented objects by name.
        folder: Where the notebooks go, one folder per language.
        limit_seconds: How long one may take.
        facts: What all notebooks remember of their origin.
        fingerprints: Stand for the code of each page, by its file.
    """

    root: Path
    suite: Suite
    objects: Mapping[str, Mapping[str, Any]]
    folder: Path
    limit_seconds: float
    facts: Mapping[str, str] = field(default_factory=dict)
    fingerprints: Mapping[Path, str] = field(default_factory=dict)

    def make(self, name: str) -> Iterator[Made]:
        """Makes the notebooks of one page in all its languages; an older one is gone when the new one fails."""
        pages = [self.suite.tree.page(name, language) for language in self.suite.languages]
        findings = tuple(self._findings(name, pages))
        original: Made | None = None
        for page in pages:
            self.file(page).unlink(missing_ok=True)
            made = Made(page, FAIL, findings=findings) if findings else self._make(page, original)
            original = original or made
            yield made

    def file(self, page: Page) -> Path:
        """Where the executed notebook of a page goes."""
        return self.folder / page.language / f"{page.name}.ipynb"

    def _findings(self, name: str, pages: list[Page]) -> Iterator[Finding]:
        yield from self.suite.check_one(name)
        for page in pages:
            for hook in page.hooks:
                if hook.text not in self.objects:
                    yield Finding(page.path, hook.line, f"`{hook.text}` is not in the API reference: correct the name")

    def _make(self, page: Page, original: Made | None) -> Made:
        book = build_notebook(page, self.objects, {**self.facts, **origin(page, self.fingerprints.get(page.path, ""))})
        if kind_of(page) == NOTHING:
            self._write(book, page)
            return Made(page, NONE, "no code")
        if original and compare(original.page, page).same_code:
            return self._share(book, page, original)
        place = self.folder / ".run" / page.language / page.name
        execution = execute(book, page, self.root, place, self.limit_seconds)
        if execution.failure:
            return Made(page, FAIL, execution=execution)
        self._write(execution.book, page)
        return Made(page, PASS, execution=execution)

    def _share(self, book: NotebookNode, page: Page, original: Made) -> Made:
        note = f"code identical to {original.page.language}"
        if original.status == FAIL or not original.execution:
            return Made(page, FAIL, f"{note}, which failed")
        self._write(with_outputs_of(original.execution.book, book), page)
        return Made(page, SAME, note)

    def _write(self, book: NotebookNode, page: Page) -> None:
        file = self.file(page)
        file.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, file)
