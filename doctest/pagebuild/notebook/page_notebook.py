"""From a page to a notebook that has not been executed yet."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

from pagebuild.notebook.kind import NO_CODE, SEVERAL_RANKS, notebook_kind, script_arguments
from pagebuild.notebook.texts import format_text
from pagebuild.notebook.translate import LINE, TEXT_ONLY, NotebookTranslator
from pagebuild.runs import shown_outputs
from pagetest.model.page import Page
from pagetest.results.run_finder import RecordedRun

_CELLS = Path(__file__).with_name("cells")
_SETUP_FILES = {"one": _CELLS / "one_rank.py", "several": _CELLS / "several_ranks.py"}
_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def build_notebook(
    page: Page, objects: Mapping[str, Mapping[str, Any]], facts: Mapping[str, str], run: RecordedRun | None = None
) -> NotebookNode:
    """Makes the notebook of a page."""
    text = NotebookTranslator(page, objects, shown_outputs(page, run)).markdown()
    read = jupytext.reads(text, fmt={"extension": ".md", "format_name": "markdown"})
    first, *others = [_cell(cell, page) for cell in read.cells if cell.source.strip()]
    end = _program_end(others)
    cells = [first, *_setup_cells(page), *others[:end], *_launch_cells(page), *others[end:]]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    metadata = {"kernelspec": _KERNEL, "colossal": dict(facts)}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(notebook)
    _check_code(notebook, page)
    return notebook


def _cell(cell: NotebookNode, page: Page) -> NotebookNode:
    if cell.cell_type == "markdown":
        return nbformat.v4.new_markdown_cell(cell.source.replace(TEXT_ONLY, "").strip("\n"))
    line = cell.metadata[LINE]
    note = f"%%page {line}\n" if notebook_kind(page) == SEVERAL_RANKS else ""
    return nbformat.v4.new_code_cell(note + cell.source, metadata={LINE: line})


def _setup_cells(page: Page) -> list[NotebookNode]:
    """The cell that initializes a process group, or that defines how to start one."""
    kind = notebook_kind(page)
    if kind == NO_CODE:
        return []
    code = _SETUP_FILES[kind].read_text(encoding="utf-8").strip("\n")
    return [nbformat.v4.new_code_cell(code.replace('["page.py"]', json.dumps(script_arguments(page))))]


def _program_end(cells: Sequence[NotebookNode]) -> int:
    """Where the section ends that holds the last code."""
    last = max((place for place, cell in enumerate(cells) if cell.cell_type == "code"), default=-1)
    headings = (place for place, cell in enumerate(cells) if place > last and cell.source.startswith(("# ", "## ")))
    return next(headings, len(cells))


def _launch_cells(page: Page) -> list[NotebookNode]:
    """The cell that runs the program of several ranks."""
    if notebook_kind(page) != SEVERAL_RANKS:
        return []
    heading = nbformat.v4.new_markdown_cell(f"## {format_text('run', page.language)}")
    return [heading, nbformat.v4.new_code_cell(f'run("{page.command}")', metadata={LINE: page.command_line})]


def _check_code(notebook: NotebookNode, page: Page) -> None:
    """No code of the page was lost, and none came to be run that the page does not run."""
    found = [cell for cell in notebook.cells if cell.cell_type == "code" and LINE in cell.metadata]
    parts = found[:-1] if notebook_kind(page) == SEVERAL_RANKS else found
    sources = [cell.source.removeprefix(f"%%page {cell.metadata[LINE]}\n") for cell in parts]
    wanted = [_strip_newlines(block.source) for block in page.runnable]
    assert sources == wanted, f"{page.path}: jupytext has changed the code"


def _strip_newlines(source: str) -> str:
    return source.strip("\n")
