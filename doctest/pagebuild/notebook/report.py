"""The report: a line per notebook, and for a failure the lines of the page around it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pagebuild.notebook.workshop import Made
from pagetest.finding import Finding
from pagetest.results.result import FAIL, PASS, SAME

_CONTEXT = 2


def lines_of(made: Made, width: int) -> Iterator[str]:
    """The report of one notebook, whose page's name takes a column of the given width."""
    yield f"{made.page.language:<8}{made.page.name:<{width}}   {made.status}  {_facts(made)}".rstrip()
    findings = list(made.findings)
    if made.failure:
        findings.append(Finding(made.page.path, made.failure.line, made.failure.message))
    for finding in findings:
        yield str(finding)
        yield from _excerpt(made, finding)


def summary(all_made: Sequence[Made]) -> str:
    """How many notebooks were executed, how many show what another one printed, and how many are not proved."""
    counts = Counter(made.status for made in all_made)
    return f"{counts[PASS]} executed, {counts[SAME]} reused, {counts[FAIL]} failed"


def _facts(made: Made) -> str:
    if not made.execution:
        return made.note
    code = [cell for cell in made.execution.book.cells if cell.cell_type == "code"]
    done = sum(cell.execution_count is not None for cell in code)
    peak = f"peak {made.execution.peak_bytes / 1e9:.2f} GB"
    return f"cells {done}/{len(code)}  {made.execution.seconds:.1f} s  {peak}"


def _excerpt(made: Made, finding: Finding) -> Iterator[str]:
    """Five lines of Markdown around the line."""
    if finding.path != made.page.path:
        return
    for number in range(max(1, finding.line - _CONTEXT), min(len(made.page.lines), finding.line + _CONTEXT) + 1):
        yield f"  {'>' if number == finding.line else ' '} {number:>4} | {made.page.lines[number - 1]}".rstrip()
