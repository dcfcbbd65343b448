"""The report: a line per page, and for a failure the Markdown that failed."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pagetest.finding import display_path
from pagetest.model.reader import read_page
from pagetest.results.result import FAIL, FLAKY, PASS, SAME, Result
from pagetest.run.failure import Failure

_CONTEXT = 2
_NUM_EXTREMES = 3


def report_lines(result: Result, width: int) -> Iterator[str]:
    """The report of one page, whose name takes a column of the given width."""
    yield f"{result.language:<8}{result.name:<{width}}   {result.status}  {facts_of(result)}".rstrip()
    for finding in result.findings:
        yield str(finding)
        yield from excerpt(finding.path, finding.line)
    if result.failure:
        yield _failure_line(result, result.failure)
        yield from excerpt(result.path, result.failure.line)
        yield from (f"  other ranks: {other}" for other in result.failure.others)
    if result.log and result.status == FAIL:
        yield f"  log: {display_path(result.log)}"


def closing_lines(results: Sequence[Result], flaky: Sequence[Result], device: str) -> Iterator[str]:
    """The failed pages and those that passed only once more, each with its command and its reason; the counts last."""
    failed, option = [result for result in results if result.is_failed], f" --device {device}" if device else ""
    for status, result in [*((FAIL, one) for one in failed), *((FLAKY, one) for one in flaky)]:
        reason = next(iter([*_reasons(result), result.note])).partition("\n")[0]
        yield f"{status:<5} docs_test.py {result.name} --lang {result.language}{option}  # {reason}"
    yield summary(results)


def summary(results: Sequence[Result]) -> str:
    """How many pages passed and how many failed; a page without a run is neither."""
    passed = sum(result.status in {PASS, SAME} for result in results)
    return f"{passed} passed, {sum(result.is_failed for result in results)} failed"


def slowest_and_largest(results: Sequence[Result]) -> Iterator[str]:
    """The pages that took longest and the most memory, of those that ran."""
    ran = [result for result in results if result.log]
    for title, fact, unit, size in (("slowest", "seconds", "s", 1), ("hungriest", "peak_bytes", "GB", 1e9)):
        first = sorted(ran, key=lambda result, fact=fact: getattr(result, fact), reverse=True)[:_NUM_EXTREMES]
        if first:
            parts = (f"{result.name} ({result.language}) {getattr(result, fact) / size:.1f} {unit}" for result in first)
            yield f"{title}: {', '.join(parts)}"


def facts_of(result: Result) -> str:
    """Where a page ran, and what that took; or why it was not run."""
    rewritten = f", {result.outputs_rewritten} rewritten" if result.outputs_rewritten else ""
    if result.note or not result.lines_total:
        return f"{result.note}{rewritten}"
    where = " ".join(
        part for part in (result.device, result.backend, f"x{result.world}" if result.world else "") if part
    )
    peak = f"peak {result.peak_bytes / 1e9:.2f} GB"
    lines = f"lines {result.lines_run}/{result.lines_total}"
    outputs = f"  outputs {result.outputs_matched}/{result.outputs_total}{rewritten}{result.outputs_note}"
    outputs = outputs if result.outputs_total else ""
    return f"{where or 'not started'}  {result.seconds:.1f} s  {peak}  {lines}{outputs}"


def _reasons(result: Result) -> Iterator[str]:
    yield from map(str, result.findings)
    if result.failure:
        yield _failure_line(result, result.failure)


def _failure_line(result: Result, failure: Failure) -> str:
    is_of_rank = failure.rank is not None and result.world > 1
    rank = f"   [rank {failure.rank} of {result.world}, first failure]" if is_of_rank else ""
    return f"{display_path(result.path)}:{failure.line}: {failure.message}{rank}"


def excerpt(path: Path, line: int) -> Iterator[str]:
    """Five lines of Markdown around the line; none of a file of another kind."""
    if path.suffix != ".md" or not path.is_file():
        return
    lines = read_page(path, "", "").lines
    for number in range(max(1, line - _CONTEXT), min(len(lines), line + _CONTEXT) + 1):
        yield f"  {'>' if number == line else ' '} {number:>4} | {lines[number - 1]}".rstrip()
