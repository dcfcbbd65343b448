"""Which records still hold: those of pages whose code, and all that it ran with, are what they were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagetest.checks.parity import compare_structure
from pagetest.graph.fingerprint import fingerprint
from pagetest.graph.imports import ImportGraph
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.outputs.blocks import stale_outputs
from pagetest.results.records import Records
from pagetest.results.result import PASS


@dataclass(frozen=True)
class RecordedRun:
    """The run that a record is about."""

    records: Records
    record: Mapping[str, Any]

    @property
    def printed(self) -> list[str]:
        """What each block printed."""
        return [block["printed"] for block in self.record["blocks"]]

    @property
    def figures(self) -> list[list[Path]]:
        """The files of the figures that each block drew."""
        return [
            [self.records.figure(self.record, name) for name in block["figures"]] for block in self.record["blocks"]
        ]


@dataclass(frozen=True)
class RunFinder:
    """Finds the runs that hold for the pages as they are now."""

    records: Sequence[Records]
    tree: Tree
    graph: ImportGraph
    device: str
    facts: Mapping[str, Any]  # what a run that began now would hold for

    def find(self, page: Page) -> RecordedRun | None:
        """The run of a page, or of the original that has the same code; None where there is none that holds."""
        for records in self.records:
            record = records.find(self.device, page.language, page.name)
            if record and self._is_valid(record, page):
                run = RecordedRun(records, record)
                if all(file.is_file() for files in run.figures for file in files):
                    return run
        if page.language == LANGUAGES[0] or LANGUAGES[0] not in self.tree.languages(page.name):
            return None
        original = self.tree.page(page.name, LANGUAGES[0])
        return self.find(original) if compare_structure(original, page).same_code else None

    def _is_valid(self, record: Mapping[str, Any], page: Page) -> bool:
        """Whether the page passed then, would run the same now, and shows what was printed then."""
        blocks = record.get("blocks", ())
        return (
            record["status"] == PASS
            and len(blocks) == len(page.executed)
            and not changed_since(record, page, self.graph, self.facts["inputs"])
            and _relevant_versions(record.get("versions", {})) == _relevant_versions(self.facts["versions"])
            and not stale_outputs(page, printed_by_line(page, record))
        )


def changed_since(record: Mapping[str, Any], page: Page, graph: ImportGraph, inputs: str) -> str:
    """What has changed in the project since a run, which may go otherwise now; empty where nothing has."""
    if record.get("fingerprint") != fingerprint(page, graph):
        return "its code, or what it imports"
    return "" if record.get("inputs") == inputs else "the harness, constraints.txt, or code in C++ or CUDA"


def printed_by_line(page: Page, record: Mapping[str, Any]) -> dict[int, str]:
    """What each block printed in the recorded run of a page with the same code."""
    return {block.line: ran["printed"] for block, ran in zip(page.executed, record["blocks"], strict=True)}


def _relevant_versions(versions: Mapping[str, str]) -> tuple[str, str]:
    """The version of Python without its last number, and that of torch without the kind of its build."""
    return versions.get("python", "").rpartition(".")[0], versions.get("torch", "").partition("+")[0]
