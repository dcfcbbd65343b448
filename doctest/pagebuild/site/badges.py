"""Badges: where and when a page last ran, and whether that still holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagebuild.runs import DEVICES, PRETEND, FindRun
from pagebuild.site.edition import BrokenInputError
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES
from pagetest.results.records import BrokenRecordError, Records
from pagetest.results.result import FAIL, PASS, SAME

VERIFIED, OUTDATED, FAILED = "verified", "outdated", "failed"

_FACTS = ("date", "commit", "processor", "backend", "world", "seconds")

# [Note: green]
# A badge is green for one reason: a run holds, as `RunFinder` decides: it passed, and the page, the project's code that
# it imports, the files that all pages depend on, and the versions of Python and torch are what they were. Gray is what
# passed before one of them changed; red is what failed in the newest run. Where nothing ran there is no badge.


@dataclass(frozen=True)
class PageResults:
    """What became of the pages' runs."""

    newest: Mapping[tuple[str, str, str], Mapping[str, Any]]
    find_run: FindRun  # the run of a page that holds

    def badges(self, page: Page) -> list[dict[str, Any]]:
        """The badges of a page, one for each device on which it ran; see [Note: green]."""
        return [badge for device in (*DEVICES, PRETEND) if page.executed and (badge := self._badge(page, device))]

    def _badge(self, page: Page, device: str) -> dict[str, Any] | None:
        last = self._last_record(page, device)
        if last and last["status"] == FAIL:
            return _make_badge(device, FAILED, last)
        if run := self.find_run(page, device):
            return _make_badge(device, VERIFIED, run.record)
        return _make_badge(device, OUTDATED, last) if last else None

    def _last_record(self, page: Page, device: str) -> Mapping[str, Any] | None:
        """How the last run ended; a translation with the same code has that of its original."""
        record = self.newest.get((page.name, page.language, device))
        if record and record["status"] == SAME:
            record = self.newest.get((page.name, LANGUAGES[0], device))
        return record if record and record["status"] in {PASS, FAIL} else None


def _make_badge(device: str, state: str, record: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": device, "state": state} | {name: record[name] for name in _FACTS if name in record}


def read_results(folders: Iterable[Path], find: FindRun) -> PageResults:
    """Reads the records; of two for one page, language and device the newer counts, else that of the first folder."""
    newest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for entry in (entry for folder in folders for entry in _read_records(folder)):
        key = (entry["page"], entry["lang"], entry["device"])
        if key not in newest or entry.get("date", "") > newest[key].get("date", ""):
            newest[key] = entry
    return PageResults(newest, find)


def _read_records(folder: Path) -> list[dict[str, Any]]:
    try:
        return Records(folder).read()
    except BrokenRecordError as error:
        raise BrokenInputError(error.finding) from None
