"""From a page to a notebook that has not been executed yet."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

from pagebuild.notebook.kind import SEVERAL_RANKS, notebook_kind, script_arguments
from pagebuild.notebook.texts import format_text
from pagebuild.notebook.translate import LINE, TEXT_ONLY, NotebookTranslator
from pagebuild.runs import shown_outputs
from pagetest.model.page import CHECK, FIGURE, RUN, Block, Page
from pagetest.results.run_finder import RecordedRun

_CELLS = Path(__file__).with_name("cells")
_SHELL_FILE = _CELLS / "shell.py"
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
    block = next(block for block in page.blocks if block.line == line)
    metadata: dict[str, Any] = {LINE: line}
    if block.role in {CHECK, FIGURE}:  # what need not be read is folded
        metadata |= {"tags": [block.role], "jupyter": {"source_hidden": True}}
    return nbformat.v4.new_code_cell(_magic(block, page) + cell.source.strip("\n"), metadata=metadata)


def _magic(block: Block, page: Page) -> str:
    """The first line of a cell that is not run as Python where it stands."""
    if block.file:
        return f"%%writefile {block.file}\n"
    if block.role == RUN:
        return "%%bash\n"
    return f"%%page {block.line}\n" if notebook_kind(page) == SEVERAL_RANKS else ""


def _setup_cells(page: Page) -> list[NotebookNode]:
    """The cells that start a shell, and that initialize a process group or define how to start one."""
    # The shell comes first: what it starts does not belong to the ranks of the notebook.
    files = [_SHELL_FILE] if page.shell else []
    files += [_SETUP_FILES[notebook_kind(page)]] if page.runnable else []
    codes = [file.read_text(encoding="utf-8").strip("\n") for file in files]
    arguments = json.dumps(script_arguments(page))
    return [nbformat.v4.new_code_cell(code.replace('["page.py"]', arguments)) for code in codes]


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
    code = [block for block in page.blocks if block.is_code and not block.ignored]
    wanted = [_magic(block, page) + block.source.strip("\n") for block in code]
    assert [cell.source for cell in parts] == wanted, f"{page.path}: jupytext has changed the code"
