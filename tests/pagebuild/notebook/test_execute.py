"""Notebooks are executed, within their limit, and failures are told at the page's line."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

from pagebuild import cli
from pagebuild.notebook.execute import Execution
from pagebuild.notebook.failure import Failure

ROOT = Path(__file__).resolve().parents[3]
WORLD = """# World

```python
import os

rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
```

Then:

```python
print(f"rank {rank} of {size}")
```

<!-- doc-test-command: COMMAND -->
"""
ONE = WORLD.replace("COMMAND", "python lesson.py")
TWO = WORLD.replace("COMMAND", "torchrun --standalone --nproc_per_node=2 lesson.py")


def printed(made) -> list[str]:
    outputs = [output for cell in made.execution.book.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.output_type == "stream").splitlines()


def page(code: str, command: str = "python lesson.py") -> str:
    return f"# T\n\n```python\n{code.strip()}\n```\n\n<!-- doc-test-command: {command} -->\n"


def kernels() -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ())
        if "ipykernel_launcher" in words and "notebook-" in words:
            found.append(words)
    return found


@pytest.fixture
def executions(monkeypatch) -> list[str]:
    """The languages whose notebooks are executed, which only print the name of their language."""
    executed = []

    def execute(book, page, *_: object) -> Execution:
        executed.append(page.language)
        for cell in (cell for cell in book.cells if cell.cell_type == "code"):
            cell.outputs = [nbformat.v4.new_output("stream", text=page.language)]
        book.metadata.language_info = {"name": "python"}
        return Execution(book, 1.0, 1)

    monkeypatch.setattr("pagebuild.notebook.workshop.execute", execute)
    return executed


def test_a_page_of_one_rank_is_executed_and_shared_with_its_translation(pages) -> None:
    pages.write("lesson", ONE)
    english, chinese = pages.make("lesson")
    assert (english.status, chinese.status, chinese.note) == ("PASS", "SAME", "code identical to en")
    assert printed(english) == ["rank 0 of 1"]
    books = [nbformat.read(pages.workshop().file(made.page), as_version=4) for made in (english, chinese)]
    shown = [
        [(cell.execution_count, cell.outputs) for cell in book.cells if cell.cell_type == "code"] for book in books
    ]
    assert shown[0] == shown[1]
    assert [count for count, _ in shown[0]] == [1, 2, 3]
    assert books[1].metadata.colossal.lang == "zh-Hans"
    assert not kernels()


def test_a_page_of_two_ranks_is_written_and_started_by_torchrun(pages) -> None:
    pages.write("lesson", TWO)
    english, chinese = pages.make("lesson")
    assert (english.status, chinese.status) == ("PASS", "SAME")
    assert printed(english) == ["rank 0 of 2", "--- rank 1 ---", "rank 1 of 2"]


@pytest.mark.parametrize(
    ("code", "executed"),
    [
        ("x = 1  # 一\nprint('hello')", ["en"]),
        ("x = 1\nprint('你好')", ["en", "zh-Hans"]),
    ],
)
def test_the_same_code_is_executed_once_and_other_code_itself(pages, executions, code, executed) -> None:
    pages.write("lesson", page("x = 1\nprint('hello')"), "en")
    pages.write("lesson", page(code).replace("# T", "# 课"), "zh-Hans")
    english, chinese = pages.make("lesson")
    assert executions == executed
    assert (english.status, chinese.status) == ("PASS", "SAME" if executed == ["en"] else "PASS")
    book = nbformat.read(pages.workshop().file(chinese.page), as_version=4)
    assert book.metadata.colossal.lang == "zh-Hans"
    assert book.cells[0].source.startswith("# 课\n\n*本笔记本由")
    assert book.cells[-1].source == code
    assert book.cells[-1].outputs[0].text == executed[-1]


def test_a_translation_that_is_asked_for_alone_is_executed(pages, executions, tmp_path, capsys) -> None:
    pages.write("lesson", ONE)
    (tmp_path / "api.json").write_text(json.dumps({"version": "0", "objects": {}}))
    places = ["--source", pages.folder / "source", "--output", tmp_path / "out", "--api", tmp_path / "api.json"]
    assert cli.main(["notebooks", "lesson", "--lang", "zh-Hans", *map(str, places)], ROOT) == 0
    assert executions == ["zh-Hans"]
    assert capsys.readouterr().out.endswith("\n1 executed, 0 reused, 0 failed\n")
    assert not (tmp_path / "out" / "en").exists()


def test_a_page_without_code_is_a_notebook_all_the_same(pages) -> None:
    pages.write("lesson", "# T\n\nWords.\n\n<!-- doc-test-command: none -->\n")
    made = pages.make("lesson")
    assert [one.status for one in made] == ["NONE", "NONE"]
    assert all(pages.workshop().file(one.page).is_file() for one in made)


def test_figures_are_seen_whether_shown_or_saved(pages) -> None:
    code = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([0, 1])
figure.savefig("saved.svg")
"""
    pages.write("lesson", page(code))
    english, _ = pages.make("lesson")
    assert english.status == "PASS", english.failure
    kinds = [
        kind for cell in english.execution.book.cells for o in cell.get("outputs", ()) for kind in o.get("data", ())
    ]
    assert "image/svg+xml" in kinds
    assert "image/png" in kinds


# ------------------------------------------------------------------------------------------ failures


def test_a_failing_cell_is_named_by_the_line_of_the_page(pages) -> None:
    pages.write("lesson", page("def inner(x):\n    return 1 // x\n\n\ninner(1)\ninner(0)"))
    older = pages.folder / "notebooks/en/lesson.ipynb"
    older.parent.mkdir(parents=True)
    older.write_text("of a page that did not fail")
    english, chinese = pages.make("lesson")
    assert english.failure == Failure(5, "ZeroDivisionError: integer division or modulo by zero")
    assert (english.status, chinese.status, chinese.note) == ("FAIL", "FAIL", "code identical to en, which failed")
    assert not older.exists()
    assert not kernels()


def test_a_kernel_that_dies_is_a_failure(pages) -> None:
    pages.write("lesson", page("import os\nos._exit(1)"))
    english, _ = pages.make("lesson")
    assert english.failure.line == 4
    assert english.failure.message.startswith("the notebook could not be executed: ")
    assert not kernels()


def test_a_failure_of_several_ranks_is_named_by_the_line_of_the_page(pages) -> None:
    code = "import os\n\nif os.environ['RANK'] == '1':\n    raise ValueError('on rank 1')\n"
    pages.write("lesson", page(code, "torchrun --standalone --nproc_per_node=2 lesson.py"))
    english, _ = pages.make("lesson")
    assert (english.failure.line, english.failure.message) == (7, "ValueError: on rank 1")


def test_a_notebook_that_takes_too_long_is_ended_with_all_its_processes(pages) -> None:
    pages.write("lesson", "# T\n\n```python\nx = 1\n```\n\n```python\nwhile True:\n    pass\n```\n\n"
                "<!-- doc-test-command: python lesson.py -->\n")  # fmt: skip
    english, _ = pages.make("lesson", 6.0)
    assert english.failure.line == 8
    assert "the notebook took longer than 6 s" in english.failure.message
    assert not kernels()


def test_a_process_that_stays_behind_is_a_failure(pages) -> None:
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    pages.write("lesson", page(code))
    english, _ = pages.make("lesson")
    assert "the notebook left processes behind" in english.failure.message
    assert "sleep 60" in english.failure.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (page("x = 1", "echo lesson.py"), "lesson.md:7: `echo` does not run the page's code"),
        (page("x ="), "lesson.md:4: SyntaxError"),
        (page("x = 1") + "\n{{ autodoc:pack.nought }}\n", "lesson.md:9: `pack.nought` is not in the API reference"),
    ],
)
def test_a_page_with_findings_is_not_executed(pages, text, message) -> None:
    pages.write("lesson", text)
    made = pages.make("lesson")
    assert [one.status for one in made] == ["FAIL", "FAIL"]
    assert any(message in str(finding) for finding in made[0].findings)
    assert not any(one.execution for one in made)


def test_a_warning_that_readers_would_see_is_a_failure(pages) -> None:
    pages.write("lesson", page("import warnings\nwarnings.warn('old', stacklevel=1)"))
    english, _ = pages.make("lesson")
    assert english.failure == Failure(5, "UserWarning: old: correct what causes it")


# ------------------------------------------------------------------------------------------ the front door


def test_the_front_door_executes_a_page(pages, tmp_path) -> None:
    pages.write("basics/lesson", ONE)
    (tmp_path / "api.json").write_text(json.dumps({"version": "0", "objects": {}}))
    words = ["notebooks", "lesson", "--source", "source", "--output", "out", "--api", "api.json"]
    command = [sys.executable, str(ROOT / "docs_build.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("en      basics/lesson   PASS  cells 3/3")
    assert lines[1:] == ["zh-Hans basics/lesson   SAME  code identical to en", "1 executed, 1 reused, 0 failed"]
    assert (
        nbformat.read(tmp_path / "out/en/basics/lesson.ipynb", as_version=4).metadata.colossal.page == "basics/lesson"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lessen"], "no page is called `lessen`; the nearest: lesson"),
        (["lesson", "--api", "nowhere.json"], "nowhere.json:1: the file is missing: run `python docs_build.py api`"),
    ],
)
def test_a_wrong_call_says_what_to_do(pages, capsys, words, message) -> None:
    pages.write("lesson", ONE)
    assert cli.main(["notebooks", *words, "--source", str(pages.folder / "source")], ROOT) == 2
    assert message in capsys.readouterr().err
