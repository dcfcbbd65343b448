"""Executes one notebook: `python child.py IN OUT`; a process of its own, which the session watches and ends."""

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from traitlets.config import Config

FAILED = 3
"""The exit status where a cell failed; its story is in the notebook."""


def main(source: Path, target: Path) -> int:
    """Executes the notebook in the working folder and writes it, with all outputs up to a failure."""
    # The number of the cell that runs is kept next to the target, in `.cell`.
    notebook = nbformat.read(source, as_version=4)
    progress = target.with_suffix(".cell")

    def note(cell: NotebookNode, cell_index: int) -> None:
        del cell
        progress.write_text(json.dumps(cell_index))

    client = NotebookClient(
        notebook,
        config=Config({"KernelManager": {"transport": "ipc"}}),
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": "."}},
        on_cell_start=note,
        record_timing=False,
        coalesce_streams=True,
    )
    try:
        client.execute()
    except CellExecutionError:
        return FAILED
    finally:
        nbformat.write(notebook, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
