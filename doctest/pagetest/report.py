"""The report: a line per page, and for a failure the Markdown that failed."""

import json
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagetest.finding import shown
from pagetest.reader import read_page
from pagetest.result import FAIL, PASS, SAME, Result

_CONTEXT = 2


def lines_of(result: Result, width: int) -> Iterator[str]:
    """The report of one page, whose name takes a column of the given width."""
    yield f"{result.language:<8}{result.name:<{width}}   {result.status}  {_facts(result)}".rstrip()
    for finding in result.findings:
        yield str(finding)
        yield from _excerpt(finding.path, finding.line)
    if result.failure:
        rank = "" if result.failure.rank is None else _rank(result)
        yield f"{shown(result.path)}:{result.failure.line}: {result.failure.message}{rank}"
        yield from _excerpt(result.path, result.failure.line)
        yield from (f"  other ranks: {other}" for other in result.failure.others)
    if result.log and result.status == FAIL:
        yield f"  log: {shown(result.log)}"


def summary(results: Sequence[Result]) -> str:
    """How many pages are proved, and how many are not; a page without a run is neither."""
    passed = sum(result.status in {PASS, SAME} for result in results)
    return f"{passed} passed, {sum(result.is_failed for result in results)} failed"


def write_json(results: Sequence[Result], file: Path, root: Path) -> None:
    """Writes the results with what they hold for: commit, Python, torch."""
    shared = {"commit": _commit(root), "python": platform.python_version(), "torch": _torch_version()}
    entries = [result.as_json() | shared for result in results]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _facts(result: Result) -> str:
    if not result.lines_total:
        return result.note
    where = " ".join(
        part for part in (result.device, result.backend, f"x{result.world}" if result.world else "") if part
    )
    peak = f"peak {result.peak_bytes / 1e9:.2f} GB"
    return f"{where or 'not started'}  {result.seconds:.1f} s  {peak}  lines {result.lines_run}/{result.lines_total}"


def _rank(result: Result) -> str:
    rank = result.failure.rank if result.failure else 0
    return f"   [rank {rank} of {result.world}, first failure]" if result.world > 1 else ""


def _excerpt(path: Path, line: int) -> Iterator[str]:
    """Five lines of Markdown around the line."""
    if path.suffix != ".md" or not path.is_file():
        return
    lines = read_page(path, "", "").lines
    for number in range(max(1, line - _CONTEXT), min(len(lines), line + _CONTEXT) + 1):
        yield f"  {'>' if number == line else ' '} {number:>4} | {lines[number - 1]}".rstrip()


def _commit(root: Path) -> str:
    """The commit that was tested, with a mark if the tree holds changes; empty outside a repository."""
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
