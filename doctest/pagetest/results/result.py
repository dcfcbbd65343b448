"""The result of a page: what the report and the JSON file say about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagetest.finding import Finding, display_path
from pagetest.model.page import Page
from pagetest.model.script import Script
from pagetest.run.failure import Failure

PASS, SAME, FAIL, NONE = "PASS", "SAME", "FAIL", "NONE"
FLAKY = "FLAKY"
"""What the closing lines say of a page that failed and then passed; no status of a result, and in no record."""

PageKey = tuple[str, str]


@dataclass(frozen=True)
class Figure:
    """A figure that a page drew into its folder."""

    name: str
    line: int  # the line of the Python block that drew it
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Result:
    """What became of one page in one language."""

    name: str
    language: str
    path: Path
    status: str  # PASS; SAME (its original ran, with the same code); NONE (nothing to run); FAIL
    note: str = ""  # what the report adds to a status without a run
    command: str = ""
    device: str = ""
    backend: str = ""
    world: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    lines_run: int = 0
    lines_total: int = 0
    outputs_matched: int = 0
    outputs_total: int = 0
    outputs_rewritten: int = 0
    outputs_note: str = ""  # why outputs that differ do not fail the page
    code_hash: str = ""
    fingerprint: str = ""  # of what ran: the page's code and all that it reaches
    findings: tuple[Finding, ...] = ()  # what forbade to run it, or which of its output blocks are stale
    failure: Failure | None = None
    log: Path | None = None
    warnings: tuple[Finding, ...] = ()  # the warnings that its readers would see
    figures: tuple[Figure, ...] = ()
    printed: Mapping[int, str] = field(default_factory=dict, repr=False)

    def shared_with(self, page: Page, script: Script) -> "Result":
        """The result of a translation with the same code, which was not run itself: it fails if this one did."""
        status, note = (FAIL, ", which failed") if self.is_failed else (SAME, "")
        return replace(
            self,
            language=page.language,
            path=page.path,
            status=status,
            note=f"code identical to {self.language}{note}",
            outputs_rewritten=0,
            code_hash=script.code_hash,
            findings=(),
            failure=None,
            log=None,
        )

    @property
    def key(self) -> PageKey:
        """The page's name and language."""
        return self.name, self.language

    @property
    def is_shared(self) -> bool:
        """Whether the facts are those of another run."""
        return bool(self.lines_total) and not self.log

    @property
    def is_failed(self) -> bool:
        """Whether the page failed."""
        return self.status == FAIL

    def as_json(self) -> dict[str, Any]:
        """The facts for the page's record."""
        shared = ("status", "note", "command", "device", "backend", "world", "seconds", "peak_bytes")
        entry = {"page": self.name, "lang": self.language} | {name: getattr(self, name) for name in shared}
        counts = ("lines_run", "lines_total", "outputs_matched", "outputs_total")
        lines = {name: getattr(self, name) for name in counts}
        return entry | lines | {"code_hash": self.code_hash, "fingerprint": self.fingerprint, "error": self._error()}

    def _error(self) -> dict[str, Any] | None:
        if self.failure:
            place = {"file": display_path(self.path), "line": self.failure.line, "rank": self.failure.rank}
            return place | {"message": self.failure.message, "others": list(self.failure.others)}
        for finding in self.findings:
            return {"file": display_path(finding.path), "line": finding.line, "rank": None, "message": finding.message}
        return None


def result_without_run(
    page: Page, script: Script, status: str, note: str = "", findings: tuple[Finding, ...] = ()
) -> Result:
    """The result of a page that was not run."""
    code_hash = "" if script.is_empty else script.code_hash
    return Result(
        page.name, page.language, page.path, status, note, page.command, code_hash=code_hash, findings=findings
    )
