"""From a page to a notebook that has not been executed yet."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

from pagebuild.notebook.kind import NOTHING, SEVERAL, arguments, kind_of
from pagebuild.notebook.texts import phrase
from pagebuild.notebook.translate import LINE, TEXT_ONLY, Translator
from pagebuild.runs import shown_outputs
from pagetest.model.page import Page
from pagetest.results.fitting import RecordedRun

_CELLS = Path(__file__).with_name("cells")
_OPENINGS = {"one": _CELLS / "one_rank.py", "several": _CELLS / "several_ranks.py"}
_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def build_notebook(
    page: Page, objects: Mapping[str, Mapping[str, Any]], facts: Mapping[str, str], run: RecordedRun | None = None
) -> NotebookNode:
    """Makes the notebook of a page.

    Args:
        page: The page, free of findings.
        objects: The documented objects by name, for the page's hooks.
        facts: What the notebook remembers of its origin.
        run: The run that fills what the text leaves open.
    """
    text = Translator(page, objects, shown_outputs(page, run)).markdown()
    read = jupytext.reads(text, fmt={"extension": ".md", "format_name": "markdown"})
    first, *others = [_cell(cell, page) for cell in read.cells if cell.source.strip()]
    end = _end_of_program(others)
    cells = [first, *_opening(page), *others[:end], *_ending(page), *others[end:]]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    metadata = {"kernelspec": _KERNEL, "colossal": dict(facts)}
    book = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(book)
    _check(book, page)
    return book


def _cell(cell: NotebookNode, page: Page) -> NotebookNode:
    if cell.cell_type == "markdown":
        return nbformat.v4.new_markdown_cell(cell.source.replace(TEXT_ONLY, "").strip("\n"))
    line = cell.metadata[LINE]
    note = f"%%page {line}\n" if kind_of(page) == SEVERAL else ""
    return nbformat.v4.new_code_cell(note + cell.source, metadata={LINE: line})


def _opening(page: Page) -> list[NotebookNode]:
    """The cell that makes a world, or the means to start one."""
    kind = kind_of(page)
    if kind == NOTHING:
        return []
    code = _OPENINGS[kind].read_text(encoding="utf-8").strip("\n")
    return [nbformat.v4.new_code_cell(code.replace('["page.py"]', json.dumps(arguments(page))))]


def _end_of_program(cells: Sequence[NotebookNode]) -> int:
    """Where the section ends that holds the last code."""
    last = max((place for place, cell in enumerate(cells) if cell.cell_type == "code"), default=-1)
    headings = (place for place, cell in enumerate(cells) if place > last and cell.source.startswith(("# ", "## ")))
    return next(headings, len(cells))


def _ending(page: Page) -> list[NotebookNode]:
    """The cell that runs the program of several ranks."""
    if kind_of(page) != SEVERAL:
        return []
    heading = nbformat.v4.new_markdown_cell(f"## {phrase('run', page.language)}")
    return [heading, nbformat.v4.new_code_cell(f'run("{page.command}")', metadata={LINE: page.command_line})]


def _check(book: NotebookNode, page: Page) -> None:
    """No code of the page was lost, and none came to be run that the page does not run."""
    found = [cell for cell in book.cells if cell.cell_type == "code" and LINE in cell.metadata]
    parts = found[:-1] if kind_of(page) == SEVERAL else found
    sources = [cell.source.removeprefix(f"%%page {cell.metadata[LINE]}\n") for cell in parts]
    wanted = [_stripped(block.source) for block in page.runnable]
    assert sources == wanted, f"{page.path}: jupytext has changed the code"


def _stripped(source: str) -> str:
    return source.strip("\n")
