"""What the records say about the pages: which runs hold, and what readers see of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Block, Page
from pagetest.model.tree import Tree
from pagetest.outputs.blocks import outputs_of
from pagetest.outputs.matching import WILDCARD
from pagetest.results.recorder import run_facts
from pagetest.results.records import FOLDER_NAME, Records
from pagetest.results.run_finder import RecordedRun, RunFinder

DEVICES = ("cpu", "cuda")
"""The devices whose runs the website shows, in this order."""

PRETEND = "pretend"
"""What the badge of a page also shows: a simulated device that rejects what a GPU rejects."""

_FENCE = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)

FindRun = Callable[[Page, str], RecordedRun | None]
"""The run that holds for a page on a device; None where there is none."""


def record_folders(root: Path, docs: Path) -> tuple[Path, ...]:
    """Where the runs of pages are recorded: those of this checkout, then those that were committed."""
    return root / "build" / "docs" / FOLDER_NAME, docs / FOLDER_NAME


def current_runs(root: Path, tree: Tree, folders: Sequence[Path]) -> FindRun:
    """Finds the runs of pages that are still written on: those that would come out the same now."""
    records, graph = [Records(folder) for folder in folders], ImportGraph(root / "src")
    facts = cache(partial(run_facts, root))
    return lambda page, device: RunFinder(records, tree, graph, device, facts(device)).find(page)


def released_runs(folder: Path) -> FindRun:
    """Finds the runs of a released version, which holds no others than those that held when it was frozen."""
    records = Records(folder)

    def find(page: Page, device: str) -> RecordedRun | None:
        record = records.find(device, page.language, page.name)
        return RecordedRun(records, record) if record else None

    return find


def shown_run(page: Page, find: FindRun) -> RecordedRun | None:
    """The run whose outputs readers see, of the first device that has one."""
    return next((run for device in DEVICES if (run := find(page, device))), None)


def machine_name(record: Mapping[str, Any]) -> str:
    """What a page ran on, in a word or two: the processor, or that it was a GPU, whose name no record knows."""
    return record.get("processor") or "CPU" if record["device"] == DEVICES[0] else "GPU"


def shown_outputs(page: Page, run: RecordedRun | None) -> dict[Block, str]:
    """What readers see in the place of output blocks with `...`: what was really printed."""
    # Where no run holds there is nothing to show: an older one may have printed what the code no longer does.
    if run is None:
        return {}
    printed = {block.line: _strip_blank_edges(text) for block, text in zip(page.executed, run.printed, strict=True)}
    texts = {output.block: printed[output.code.line] for output in outputs_of(page) if WILDCARD in output.block.source}
    return {block: text for block, text in texts.items() if text != _strip_blank_edges(block.source)}


def make_fence(text: str) -> str:
    """A fence of Markdown that no line of a text can close."""
    return "`" * max([3, *(len(marks) + 1 for marks in _FENCE.findall(text))])


def _strip_blank_edges(text: str) -> str:
    """The text without blank lines around it, and without blanks at the ends of its lines."""
    return "\n".join(line.rstrip() for line in re.split(r"\r\n|\n|\r", text)).strip("\n")
