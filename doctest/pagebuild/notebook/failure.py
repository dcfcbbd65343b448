"""Why a notebook failed, and at which line of the page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nbformat import NotebookNode

from pagebuild.notebook.translate import LINE
from pagetest.model.page import Page
from pagetest.run.python_warnings import WARNING

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"\[rank(\d+)\]: ?")
_HEADING = re.compile(r"--- rank (\d+) ---")
_CELL_FRAME = re.compile(r"(?:Cell )?In\s*\[(\d+)\], line (\d+)")
_CAUSE = re.compile(r"first observed failure.*?\brank\s*: (\d+)", re.DOTALL)
_ERROR = re.compile(r"([A-Za-z_][\w.]*)(?:: .*)?")


@dataclass(frozen=True)
class CellFailure:
    """What went wrong."""

    line: int
    message: str


def find_failure(notebook: NotebookNode, page: Page) -> CellFailure:
    """Finds the failure in an executed notebook."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    failed = next((cell for cell in cells for output in cell.outputs if output.output_type == "error"), None)
    if failed is None:
        return CellFailure(page.command_line, "the kernel ended before the notebook did")
    found = _rank_failure(failed, page)
    return found or _cell_failure(failed, cells)


def find_warning(notebook: NotebookNode, page: Page) -> CellFailure | None:
    """The first warning that readers of the notebook would see."""
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        if match := WARNING.search(_COLOR.sub("", text)):
            file, line, message = match.groups()
            return CellFailure(_line_of_warning(file, int(line), cell, page), f"{message}: correct what causes it")
    return None


def _line_of_warning(file: str, line: int, cell: NotebookNode, page: Page) -> int:
    """The page's own line, or the one at which the cell begins that called into other code."""
    start = cell.metadata.get(LINE, 1)
    if file.rpartition("/")[2] == f"{page.stem}.py":
        return line
    return start + line - 1 if "ipykernel_" in file else start


def _cell_failure(failed: NotebookNode, cells: Sequence[NotebookNode]) -> CellFailure:
    """The innermost frame in a cell of the page."""
    error = next(output for output in failed.outputs if output.output_type == "error")
    message = f"{error.ename}: {error.evalue}".split("\n")[0]
    by_count = {str(cell.execution_count): cell for cell in cells if LINE in cell.metadata}
    frames = _CELL_FRAME.findall(_COLOR.sub("", "\n".join(error.traceback)))
    for count, line in reversed(frames):
        if count in by_count:
            return CellFailure(by_count[count].metadata[LINE] + int(line) - 1, message)
    return CellFailure(failed.metadata.get(LINE, 1), message)


def _rank_failure(failed: NotebookNode, page: Page) -> CellFailure | None:
    """The traceback of the rank that failed first: line N of the program is line N of the page."""
    text = "".join(output.text for output in failed.outputs if output.output_type == "stream")
    error = next(output for output in failed.outputs if output.output_type == "error")
    cause = _CAUSE.search(error.evalue)
    ranks = _lines_by_rank(text)
    first = [cause.group(1)] if cause and cause.group(1) in ranks else []
    found = (_traceback(ranks[rank], page) for rank in [*first, *ranks])
    return next((failure for failure in found if failure), None)


def _traceback(lines: Sequence[str], page: Page) -> CellFailure | None:
    """The innermost line of the page in the first traceback, and its error."""
    frame = re.compile(rf'\s*File "(?:.*/)?{re.escape(page.stem)}\.py", line (\d+)')
    place = None
    for line in lines:
        if match := frame.match(line):
            place = int(match.group(1))
        elif place and not line.startswith((" ", "Traceback")) and _ERROR.fullmatch(line):
            return CellFailure(place, line)
    return None


def _lines_by_rank(text: str) -> dict[str, list[str]]:
    """The lines of each rank; torch marks those of a traceback, and the notebook where a rank's output begins."""
    found: dict[str, list[str]] = {}
    rank = "0"
    for line in _COLOR.sub("", text).split("\n"):
        if heading := _HEADING.fullmatch(line):
            rank = heading.group(1)
        match = _RANK.match(line)
        found.setdefault(match.group(1) if match else rank, []).append(line[match.end() :] if match else line)
    return found
