"""The outputs of a recorded run as those of a notebook's cells, and whether an executed notebook has the same."""

import base64
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from pagebuild.notebook.failure import CellFailure
from pagebuild.notebook.kind import SEVERAL_RANKS, notebook_kind
from pagebuild.notebook.translate import LINE, TYPES
from pagetest.model.page import Page
from pagetest.outputs.blocks import outputs_of
from pagetest.outputs.matching import WILDCARD, first_difference, normalize_lines
from pagetest.results.run_finder import RecordedRun

_SVG = TYPES[".svg"]
_OTHER_RANKS = "--- rank "


def fill_outputs(notebook: NotebookNode, page: Page, run: RecordedRun) -> None:
    """Gives the cells of a notebook the outputs that they would have if it had been executed."""
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    for cell, printed, _, figures in _cells_with_outputs(notebook, page, run):
        stream = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
        cell.outputs = [*stream, *(_display_output(file) for file in figures)]
    python = run.record["versions"]["python"]
    notebook.metadata.language_info = {"name": "python", "file_extension": ".py", "version": python}


def first_deviation(notebook: NotebookNode, page: Page, run: RecordedRun) -> CellFailure | None:
    """Where an executed notebook shows something else than the recorded run."""
    return next(_deviations(notebook, page, run), None)


def _deviations(notebook: NotebookNode, page: Page, run: RecordedRun) -> Iterator[CellFailure]:
    for cell, recorded, text, figures in _cells_with_outputs(notebook, page, run):
        streams = [output for output in cell.outputs if output.get("name") == "stdout"]
        printed = "".join(output.text for output in streams).partition(_OTHER_RANKS)[0]
        line = cell.metadata[LINE]
        is_shown, was_shown = bool(normalize_lines(printed)), bool(normalize_lines(recorded))
        # the program of several ranks shows its stderr too, such as a log
        if was_shown > is_shown or (is_shown > was_shown and line != page.command_line):
            yield CellFailure(
                line, f"this cell prints {_truncated(printed)}, and the page's run printed {_truncated(recorded)}"
            )
        elif differs := first_difference(text, printed):
            found = f"{_truncated(differs.printed)} where the page's run printed {_truncated(differs.expected)}"
            yield CellFailure(line, f"this cell prints {found}: a notebook must do what the page does")
        drawn = sum(_SVG in output.get("data", {}) for output in cell.outputs)
        if drawn < sum(file.suffix == ".svg" for file in figures):
            yield CellFailure(line, f"this cell shows {drawn} drawings of the {len(figures)} that the page's run drew")


def _cells_with_outputs(
    notebook: NotebookNode, page: Page, run: RecordedRun
) -> Iterator[tuple[NotebookNode, str, str, Sequence[Path]]]:
    """Each cell that shows something, with what was printed, what the page shows of it, and what was drawn."""
    # Where the page shows nothing of what was printed, anything will do. The last cell shows the program of several
    # ranks together, and its stderr after stdout.
    cells = {cell.metadata[LINE]: cell for cell in notebook.cells if cell.cell_type == "code" and LINE in cell.metadata}
    shown = {output.code.line: output.block.source for output in outputs_of(page)}
    program: list[tuple[str, str, Sequence[Path]]] = []
    for block, printed, figures in zip(page.executed, run.printed, run.figures, strict=True):
        text = shown.get(block.line, WILDCARD if normalize_lines(printed) else "")
        if block.is_python and notebook_kind(page) == SEVERAL_RANKS:
            program.append((printed, text, figures))
        else:
            yield cells[block.line], printed, text, figures
    if program:
        all_printed, texts, figures = zip(*program, strict=True)
        yield cells[page.command_line], "".join(all_printed), "\n".join([*texts, WILDCARD]), [*chain(*figures)]


def _display_output(file: Path) -> NotebookNode:
    """A figure as IPython shows it."""
    kind, content = TYPES[file.suffix], file.read_bytes()
    data = content.decode() if kind == _SVG else base64.b64encode(content).decode()
    name = "SVG" if kind == _SVG else "Image"
    plain = f"<IPython.core.display.{name} object>"
    return nbformat.v4.new_output("display_data", data={kind: data, "text/plain": plain})


def _truncated(text: str) -> str:
    first = next((line for _, line in normalize_lines(text)), "")
    return f"`{first[:80]}`" if first else "nothing"
