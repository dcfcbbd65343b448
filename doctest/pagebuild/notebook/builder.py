"""Makes the notebooks of a tree of pages, from the records of the pages' runs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from pagebuild.notebook.execute import Execution, execute_notebook
from pagebuild.notebook.failure import CellFailure
from pagebuild.notebook.kind import NO_CODE, notebook_kind
from pagebuild.notebook.page_notebook import build_notebook
from pagebuild.notebook.recorded import fill_outputs, first_deviation
from pagebuild.site.downloads import notebook_origin
from pagetest.finding import Finding
from pagetest.model.page import Page
from pagetest.results.result import FAIL, NONE, PASS, Result
from pagetest.results.run_finder import RecordedRun, RunFinder
from pagetest.suite import Suite


@dataclass(frozen=True)
class BuiltNotebook:
    """What became of one notebook."""

    page: Page
    status: str  # PASS; NONE (there is no code in it); FAIL
    run: RecordedRun | None = None  # the run that its outputs are from
    execution: Execution | None = None  # how it went when it was executed
    failure: CellFailure | None = None
    result: Result | None = None  # that of the page, where the page itself failed
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class NotebookBuilder:
    """Makes notebooks."""

    root: Path
    suite: Suite
    objects: Mapping[str, Mapping[str, Any]]
    folder: Path
    limit_seconds: float
    run_finder: RunFinder
    run_page: Callable[[Page], Result]  # runs a page of which there is none, and records it
    executed: frozenset[str] = frozenset()
    facts: Mapping[str, str] = field(default_factory=dict)
    fingerprints: Mapping[Path, str] = field(default_factory=dict)

    def build_page(self, name: str) -> Iterator[BuiltNotebook]:
        """Makes the notebooks of one page in all its languages; an older one is gone when the new one fails."""
        pages = [self.suite.tree.page(name, language) for language in self.suite.languages]
        findings = tuple(self._findings(name, pages))
        executed: list[RecordedRun] = []  # a translation with the same code uses the same run and execution
        for page in pages:
            self.notebook_file(page).unlink(missing_ok=True)
            made = BuiltNotebook(page, FAIL, findings=findings) if findings else self._build(page, executed)
            executed += [made.run] if made.run else []
            yield made

    def notebook_file(self, page: Page) -> Path:
        """Where the notebook of a page goes."""
        return self.folder / page.language / f"{page.name}.ipynb"

    def _findings(self, name: str, pages: list[Page]) -> Iterator[Finding]:
        yield from self.suite.check_one(name)
        for page in pages:
            for hook in page.hooks:
                if hook.text not in self.objects:
                    yield Finding(page.path, hook.line, f"`{hook.text}` is not in the API reference: correct the name")

    def _build(self, page: Page, executed: list[RecordedRun]) -> BuiltNotebook:
        facts = {**self.facts, **notebook_origin(page, self.fingerprints.get(page.path, ""))}
        if notebook_kind(page) == NO_CODE:
            self._write(build_notebook(page, self.objects, facts), page)
            return BuiltNotebook(page, NONE)
        run = self.run_finder.find(page)
        if run is None:
            result = self.run_page(page)
            if result.is_failed:
                return BuiltNotebook(page, FAIL, result=result)
            run = self.run_finder.find(page)
            if run is None:
                return BuiltNotebook(
                    page, FAIL, failure=CellFailure(1, "what the page prints names this machine: print less")
                )
        notebook = build_notebook(page, self.objects, facts, run)
        made = self._verify(notebook, page, run, is_new=run not in executed)
        if made.status != FAIL:
            fill_outputs(notebook, page, run)
            self._write(notebook, page)
        return made

    def _verify(self, notebook: NotebookNode, page: Page, run: RecordedRun, *, is_new: bool) -> BuiltNotebook:
        """Whether the notebook may be offered: without warnings, and as the page where it is executed."""
        for warning in run.record["warnings"]:
            return BuiltNotebook(page, FAIL, run, failure=CellFailure(warning["line"], warning["message"]))
        if page.name not in self.executed or not is_new:
            return BuiltNotebook(page, PASS, run)
        place = self.folder / ".run" / page.language / page.name
        execution = execute_notebook(notebook, page, self.root, place, self.limit_seconds)
        failure = execution.failure or first_deviation(execution.notebook, page, run)
        return BuiltNotebook(page, FAIL if failure else PASS, run, execution, failure)

    def _write(self, notebook: NotebookNode, page: Page) -> None:
        file = self.notebook_file(page)
        file.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, file)
