"""Executes a notebook in a process tree of its own, within a limit, and ends its kernel."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from pagebuild.notebook.child import FAILED
from pagebuild.notebook.failure import CellFailure, find_failure, find_warning
from pagebuild.notebook.translate import LINE
from pagetest.model.page import Page
from pagetest.run.command import CommandOutcome
from pagetest.run.environment import clean_environment
from pagetest.run.session import Session

_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Execution:
    """How a notebook went."""

    notebook: NotebookNode
    seconds: float
    peak_bytes: int
    failure: CellFailure | None = None


def execute_notebook(notebook: NotebookNode, page: Page, root: Path, place: Path, limit_seconds: float) -> Execution:
    """Runs all cells in an empty folder that goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix="notebook-") as name, _empty_folder(place):
        folder = Path(name)
        source, target = folder / "in.ipynb", folder / "out.ipynb"
        nbformat.write(notebook, source)
        words = [sys.executable, str(_CHILD), str(source), str(target)]
        session = Session(words, place, _environment(root, folder), folder / "log", limit_seconds, lambda: None)
        outcome = session.run()
        done = nbformat.read(target, as_version=4) if target.is_file() else notebook
        failure = _find_failure(outcome, done, page, folder)
        return Execution(done, round(outcome.seconds, 1), outcome.peak_bytes, failure)


@contextmanager
def _empty_folder(place: Path) -> Iterator[None]:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(place)


def _environment(root: Path, folder: Path) -> dict[str, str]:
    """That of a reader's Jupyter, without the user's settings."""
    # Figures are shown inline; and ranks write full lines, which an unbuffered output would mix.
    clean = clean_environment(os.environ, root)
    clean.pop("MPLBACKEND")
    clean.pop("PYTHONUNBUFFERED")
    places = {name: str(folder / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    # Without ipywidgets, which a reader need not have, progress bars are text, and tqdm warns of it.
    return clean | places | {"PYTHONWARNINGS": "ignore:IProgress not found"}


def _find_failure(outcome: CommandOutcome, notebook: NotebookNode, page: Page, folder: Path) -> CellFailure | None:
    if outcome.timed_out:
        message = f"the notebook took longer than {outcome.seconds:.0f} s, and was at this cell"
        return CellFailure(_running_cell_line(notebook, page, folder / "out.cell"), f"{message}: make the page faster")
    if outcome.returncode == FAILED:
        return find_failure(notebook, page)
    if outcome.returncode:
        log = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().split("\n")
        line = _running_cell_line(notebook, page, folder / "out.cell")
        return CellFailure(line, f"the notebook could not be executed: {log[-1]}")
    if outcome.leftovers:
        left = "; ".join(f"process {one.pid} ({one.command})" for one in outcome.leftovers)
        return CellFailure(page.command_line, f"the notebook left processes running: {left}")
    return find_warning(notebook, page)


def _running_cell_line(notebook: NotebookNode, page: Page, progress: Path) -> int:
    """The line of the page at which the cell that was running begins."""
    if not progress.is_file():
        return 1
    return notebook.cells[json.loads(progress.read_text())].metadata.get(LINE, page.command_line)
