"""Badges: where and when a page last ran, and whether that still holds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagebuild.site.edition import BrokenInputError
from pagetest.checks.command import NO_COMMAND
from pagetest.checks.parity import compare
from pagetest.model.page import Page
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.results.records import BrokenRecordError, Records
from pagetest.results.result import FAIL, PASS, SAME

DEVICES = ("cpu", "cuda")
VERIFIED, OUTDATED, FAILED, NEVER, NOTHING = "verified", "outdated", "failed", "never", "none"

_FACTS = ("date", "commit", "backend", "world", "seconds")

# [Note: green]
# A badge is green for one reason: a record says PASS for this page, this language and this device, and the page's code
# and all project code that it imports are what they were in that run. A translation may say SAME; then the record of
# its original decides, as long as both still have the same code. Whatever is missing or of another state is not green.


@dataclass(frozen=True)
class Present:
    """A page's code as it is now, by fingerprints that stand for it and for all project code that it reaches.

    Attributes:
        own: That of the page.
        original: That of its original; empty if the two do not have the same code.
    """

    own: str
    original: str


def present_of(page: Page, tree: Tree, fingerprint: Callable[[Page], str]) -> Present:
    """Compares a page with its original.

    Args:
        page: The page.
        tree: The tree that holds both.
        fingerprint: Computes the fingerprint of a page.
    """
    own = fingerprint(page)
    if page.language == LANGUAGES[0]:
        return Present(own, own)
    original = tree.page(page.name, LANGUAGES[0])
    return Present(own, fingerprint(original) if compare(original, page).same_code else "")


@dataclass(frozen=True)
class Results:
    """The newest result of each page, language and device.

    Attributes:
        entries: The records by these three.
        are_final: Whether they belong to a released version, whose code is not here any more and cannot change.
    """

    entries: Mapping[tuple[str, str, str], Mapping[str, Any]]
    are_final: bool = False

    def badges(self, page: Page, present: Present) -> list[dict[str, Any]]:
        """The badges of a page, one per device.

        Args:
            page: The page.
            present: Its code as it is now.
        """
        if page.command in {NO_COMMAND, ""} and not page.runnable:
            return [{"device": device, "state": NOTHING} for device in DEVICES]
        return [self._badge(page, device, present) for device in DEVICES]

    def has_run_on(self, device: str) -> bool:
        """Whether any page has passed on a device."""
        return any(key[2] == device and entry["status"] == PASS for key, entry in self.entries.items())

    def _badge(self, page: Page, device: str, present: Present) -> dict[str, Any]:
        entry = self.entries.get((page.name, page.language, device))
        if not entry:
            return {"device": device, "state": NEVER}
        state = self._state(page.name, entry, device, present)
        if state == NEVER:
            return {"device": device, "state": NEVER}
        return {"device": device, "state": state} | {name: entry[name] for name in _FACTS if name in entry}

    def _state(self, name: str, entry: Mapping[str, Any], device: str, present: Present) -> str:
        """See [Note: green]."""
        if entry["status"] == FAIL:
            return FAILED
        if entry["status"] == SAME:
            return self._state_by_original(name, entry, device, present)
        if entry["status"] != PASS or entry.get("device") != device:
            return NEVER
        return VERIFIED if self._holds(entry, present.own) else OUTDATED

    def _state_by_original(self, name: str, entry: Mapping[str, Any], device: str, present: Present) -> str:
        original = self.entries.get((name, LANGUAGES[0], device))
        if original is None or original["status"] not in {PASS, FAIL}:
            return NEVER
        if original["status"] == FAIL:
            return FAILED
        both_hold = self._holds(original, present.original) and self._holds(entry, present.own)
        return VERIFIED if both_hold else OUTDATED

    def _holds(self, entry: Mapping[str, Any], present: str) -> bool:
        """Whether the code is still that of the run."""
        return self.are_final or (bool(present) and entry.get("fingerprint") == present)


def read_results(folders: Iterable[Path], are_final: bool = False) -> Results:
    """Reads the records; of two of one page, language and device the newer one counts, else that of the later folder.

    Args:
        folders: The folders of records.
        are_final: Whether they belong to a released version.

    Raises:
        BrokenInputError: A file holds something else.
    """
    newest: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for entry in (entry for folder in folders for entry in _entries(folder)):
        key = (entry["page"], entry["lang"], entry["device"])
        if key not in newest or entry.get("date", "") >= newest[key].get("date", ""):
            newest[key] = entry
    return Results(newest, are_final)


def _entries(folder: Path) -> list[dict[str, Any]]:
    try:
        return Records(folder).read()
    except BrokenRecordError as error:
        raise BrokenInputError(error.finding) from None
