"""Where a failure is said to be, and what the report says of it."""

import nbformat
import pytest
from nbformat import NotebookNode

from pagebuild.notebook.builder import BuiltNotebook
from pagebuild.notebook.execute import Execution
from pagebuild.notebook.failure import CellFailure, find_failure, find_warning
from pagebuild.notebook.report import report_lines, summary
from pagetest.results.records import Records
from pagetest.results.run_finder import RecordedRun

pytestmark = pytest.mark.slow

PAGE = "# T\n\n```python\nx = 1\nraise ValueError\n```"
RANKS = """before
--- rank 1 ---
[rank1]: Traceback (most recent call last):
[rank1]:   File "/place/lesson.py", line 4, in <module>
[rank1]:     inner()
[rank1]:   File "/place/lesson.py", line 5, in inner
[rank1]:     raise ValueError("on rank 1")
[rank1]:   File "/lib/other.py", line 99, in helper
[rank1]: ValueError: on rank 1
--- rank 2 ---
Traceback (most recent call last):
  File "lesson.py", line 4, in <module>
    barrier()
ConnectionError: the peer is gone
"""
CAUSE = """the program ended with exit code 1
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_17:00:00
  rank      : {} (local_rank: {})
"""


def code(*outputs: NotebookNode, count: int | None = 1, line: int | None = 4) -> NotebookNode:
    cell = nbformat.v4.new_code_cell("", execution_count=count, outputs=list(outputs))
    cell.metadata.update({} if line is None else {"page_line": line})
    return cell


def stream(text: str) -> NotebookNode:
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def error(name: str, message: str, *traceback: str) -> NotebookNode:
    return nbformat.v4.new_output("error", ename=name, evalue=message, traceback=list(traceback))


def notebook(*cells: NotebookNode) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T"), *cells])


def test_the_innermost_cell_of_the_page_counts(parse) -> None:
    frames = "Cell \x1b[32mIn[3]\x1b[39m, line 1\\n", "Cell In[2], line 7, in f(x)", "File /lib/other.py:99, in g()"
    cells = [
        code(count=1, line=None),
        code(count=2, line=10),
        code(error("KeyError", "'a'\nb", *frames), count=3, line=30),
    ]
    assert find_failure(notebook(*cells), parse(PAGE)) == CellFailure(16, "KeyError: 'a'")


def test_a_failure_outside_of_the_pages_cells_is_told_at_the_cell(parse) -> None:
    failed = code(error("OSError", "x", "File /lib/other.py:99"), line=30)
    assert find_failure(notebook(failed), parse(PAGE)) == CellFailure(30, "OSError: x")


@pytest.mark.parametrize(
    ("rank", "failure"),
    [
        ("1", CellFailure(5, "ValueError: on rank 1")),
        ("2", CellFailure(4, "ConnectionError: the peer is gone")),
        ("3", CellFailure(5, "ValueError: on rank 1")),
    ],
)
def test_a_program_of_several_ranks_is_told_by_the_rank_that_failed_first(parse, rank, failure) -> None:
    failed = code(stream(RANKS), error("RuntimeError", CAUSE.replace("{}", rank)), line=9)
    assert find_failure(notebook(failed), parse(PAGE)) == failure


def test_a_program_that_ends_without_a_traceback_is_told_at_its_command(parse) -> None:
    failed = code(stream("Killed\n"), error("RuntimeError", "the program ended with exit code 9"), line=9)
    assert find_failure(notebook(failed), parse(PAGE)) == CellFailure(
        9, "RuntimeError: the program ended with exit code 9"
    )


def test_a_notebook_without_an_error_lost_its_kernel(parse) -> None:
    assert find_failure(notebook(code()), parse(PAGE)).message == "the kernel ended before the notebook did"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/var/ipykernel_12/34.py:2: UserWarning: old", 5),
        ("lesson.py:5: DeprecationWarning: old", 5),
        ("[rank0]: /place/lesson.py:4: FutureWarning: old", 4),
        ("/lib/other.py:99: UserWarning: old", 4),
    ],
)
def test_a_warning_is_found(parse, text, line) -> None:
    found = find_warning(notebook(code(stream(f"before\n{text}\n  code\n"))), parse(PAGE))
    assert found
    assert (found.line, found.message.endswith("Warning: old: correct what causes it")) == (line, True)


def test_words_about_warnings_are_none(parse) -> None:
    text = "2026-11-20 colossal WARNING: [rank 0] slow\nUserWarning is a class\n12:30: no warning\n"
    assert find_warning(notebook(code(stream(text))), parse(PAGE)) is None


def test_the_report_reads_like_the_harness(parse) -> None:
    page = parse(PAGE)
    page.path.write_text("\n".join(page.lines))
    execution = Execution(notebook(code(count=1), code(count=None)), 9.14, 1_280_000_000, CellFailure(5, "ValueError"))
    failed = BuiltNotebook(page, "FAIL", execution=execution, failure=execution.failure)
    first, place, *excerpt = report_lines(failed, 8)
    assert first == "en      lesson     FAIL  cells 1/2  9.1 s  peak 1.28 GB"
    assert place.endswith("lesson.md:5: ValueError")
    shown = ["   3 | ```python", "   4 | x = 1", "   5 | raise ValueError", "   6 | ```", "   7 |"]
    assert [line.replace(">", " ").removeprefix("    ") for line in excerpt] == shown
    assert excerpt[2].startswith("  > ")
    run = RecordedRun(Records(page.path.parent), {"lang": "en", "date": "2026-11-20"})
    passed = BuiltNotebook(page, "PASS", run)
    assert list(report_lines(passed, 6)) == ["en      lesson   PASS  run of en, 2026-11-20"]
    executed = BuiltNotebook(page, "PASS", run, execution)
    found = summary([failed, passed, executed, BuiltNotebook(page, "NONE")])
    assert found == "2 with recorded outputs, 1 of them executed, 1 failed"
