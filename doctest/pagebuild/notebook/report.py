"""The report: a line per notebook, and for a failure the lines of the page around it."""

from collections.abc import Iterator, Sequence

from pagebuild.notebook.builder import BuiltNotebook
from pagetest.finding import Finding
from pagetest.results.report import excerpt
from pagetest.results.report import report_lines as lines_of_result
from pagetest.results.result import FAIL, PASS


def report_lines(made: BuiltNotebook, width: int) -> Iterator[str]:
    """The report of one notebook, whose page's name takes a column of the given width."""
    if made.result:
        yield from lines_of_result(made.result, width)
        return
    yield f"{made.page.language:<8}{made.page.name:<{width}}   {made.status}  {_run_facts(made)}".rstrip()
    findings = list(made.findings)
    if made.failure:
        findings.append(Finding(made.page.path, made.failure.line, made.failure.message))
    for finding in findings:
        yield str(finding)
        yield from excerpt(finding.path, finding.line)


def summary(all_made: Sequence[BuiltNotebook]) -> str:
    """How many notebooks show a recorded run, how many of them were also executed, and how many are not offered."""
    passed = [made for made in all_made if made.status == PASS]
    executed = sum(made.execution is not None for made in passed)
    failed = sum(made.status == FAIL for made in all_made)
    return f"{len(passed)} with recorded outputs, {executed} of them executed, {failed} failed"


def _run_facts(made: BuiltNotebook) -> str:
    if made.execution:
        code = [cell for cell in made.execution.notebook.cells if cell.cell_type == "code"]
        done = sum(cell.execution_count is not None for cell in code)
        peak = f"peak {made.execution.peak_bytes / 1e9:.2f} GB"
        return f"cells {done}/{len(code)}  {made.execution.seconds:.1f} s  {peak}"
    return f"run of {made.run.record['lang']}, {made.run.record['date']}" if made.run else ""
