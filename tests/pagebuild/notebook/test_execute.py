# pyright: reportReturnType=false
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
from pagebuild.notebook.failure import CellFailure
from pagetest.results.records import Records
from pagetest.results.sample import sample

pytestmark = pytest.mark.slow

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
IN_A_SCRIPT = "'__file__' in globals()"
BEFORE_THE_KERNEL_WAS_UP = 1
"""The line of a page that is named where its time was over before the first cell: a machine under load."""
ONE = WORLD.replace("COMMAND", "torchrun --standalone --nproc_per_node=1 lesson.py")
TWO = WORLD.replace("COMMAND", "torchrun --standalone --nproc_per_node=2 lesson.py")


def printed(made) -> list[str]:
    outputs = [output for cell in made.execution.notebook.cells for output in cell.get("outputs", ())]
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
    """The languages whose notebooks are executed; they show what the test puts into the list's `shows`."""
    executed = []

    def execute(notebook, page, *_: object) -> Execution:
        executed.append(page.language)
        return Execution(notebook, 1.0, 1)

    monkeypatch.setattr("pagebuild.notebook.builder.execute_notebook", execute)
    return executed


def outputs(notebook) -> list[list[str]]:
    """What each code cell shows: printed text, and the kinds of its figures."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[output.get("text") or min(output.data) for output in cell.outputs] for cell in cells]


# ------------------------------------------------------------------------------------------ outputs of a run


DRAWS = """# T

```python
from pathlib import Path
print("one")
Path("a.svg").write_text("<svg>a</svg>") and None
```

```python
print("two", 0.5)
```

```text output
two 0.5001
```

```python
Path("b.png").write_bytes(b"png") and None
```

<!-- doc-test-command: COMMAND lesson.py -->
"""
PYTHON = DRAWS.replace("COMMAND", "python")
TORCHRUN = DRAWS.replace("COMMAND", "torchrun --standalone --nproc_per_node=2")


def test_cells_show_what_the_page_s_run_printed_and_drew(pages, executions) -> None:
    pages.write("lesson", PYTHON)
    made = pages.make("lesson")
    assert [one.status for one in made] == ["PASS", "PASS"]
    assert (pages.ran, executions) == (["en"], [])
    for language in ("en", "zh-Hans"):
        notebook = pages.notebook(language)
        assert outputs(notebook) == [[], ["one\n", "image/svg+xml"], ["two 0.5\n"], ["image/png"]]
        assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [1, 2, 3, 4]
        assert notebook.metadata.colossal.lang == language
        assert notebook.metadata.language_info.name == "python"
    shown = [cell for cell in pages.notebook("en").cells if cell.cell_type == "code"]
    assert shown[1].outputs[1].data["image/svg+xml"] == "<svg>a</svg>"
    assert shown[3].outputs[0].data["image/png"].strip() == "cG5n"


def test_the_last_cell_of_several_ranks_shows_all(pages, executions) -> None:
    pages.write("lesson", TORCHRUN)
    pages.make("lesson")
    assert executions == []
    assert outputs(pages.notebook("en")) == [[], [], [], [], ["one\ntwo 0.5\n", "image/svg+xml", "image/png"]]


SHELL = """# T

```python file=sub/train.py
import os, sys

print(os.environ.get("RANK"), sys.argv[1], sep="|")
```

```shell run
NAME=x
mkdir inner && cd inner
```

Words.

```shell run
python ../sub/train.py $NAME
basename $PWD
echo complaint >&2
printf 'no end'
```

```text output
None|x
inner
complaint
no end
```
"""
PROGRAM = """
```python
print(2)
```

```python check
print(0.5)
```

```text output
0.50001
```
"""


@pytest.mark.parametrize(
    ("program", "command"),
    [("", "none"), (PROGRAM, "python lesson.py"), (PROGRAM, "torchrun --standalone --nproc_per_node=2 lesson.py")],
)
def test_transcripts_run_in_one_shell_and_show_what_the_page_s_run_printed(pages, program, command) -> None:
    pages.write("lesson", f"{SHELL}{program}\n<!-- doc-test-command: {command} -->\n")
    english, chinese = pages.make("lesson", execute=True)
    assert (english.status, english.failure, english.findings, english.result) == ("PASS", None, (), None)
    assert (chinese.status, pages.ran) == ("PASS", ["en"])
    shown = [one for one in outputs(pages.notebook("en")) if one]
    shell = ["None|x\ninner\ncomplaint\nno end"]
    wanted = {"none": [shell], "python": [shell, ["2\n"], ["0.5\n"]], "torchrun": [shell, ["2\n0.5\n"]]}
    assert shown == wanted[command.split()[0]]


def test_a_transcript_that_goes_otherwise_in_the_notebook_is_no_notebook(pages) -> None:
    text = "# T\n\n```shell run\necho ${JPY_PARENT_PID:+notebook}\n```\n\n<!-- doc-test-command: none -->\n"
    pages.write("lesson", text)
    english, _ = pages.make("lesson", execute=True)
    assert english.failure.line == 4
    assert "this cell prints `notebook`, and the page's run printed nothing" in english.failure.message
    text = "# T\n\n```shell run\necho 1\ntest -z $JPY_PARENT_PID\n```\n\n<!-- doc-test-command: none -->\n"
    pages.write("lesson", text)
    english, _ = pages.make("lesson", execute=True)
    assert english.failure.line == 4
    assert "a command ended with exit code 1" in english.failure.message


def test_a_program_of_several_ranks_may_log_where_it_prints_nothing(pages) -> None:
    program = "```python\nimport sys\n\nsys.stderr.write('a log line\\n')\n```\n"
    command = "torchrun --standalone --nproc_per_node=2 lesson.py"
    pages.write("lesson", f"# T\n\n{program}\n<!-- doc-test-command: {command} -->\n")
    english, _ = pages.make("lesson", execute=True)
    assert (english.status, english.failure) == ("PASS", None)


def test_a_page_is_not_run_again_until_something_changes(pages) -> None:
    pages.write("lesson", PYTHON)
    pages.make("lesson")
    pages.make("lesson")
    assert pages.ran == ["en"]
    pages.write("lesson", PYTHON.replace("# T", "# T\n\nMore words, and other lines."))
    pages.make("lesson")
    assert pages.ran == ["en"]
    assert outputs(pages.notebook("zh-Hans"))[2] == ["two 0.5\n"]
    pages.write("lesson", PYTHON.replace("0.5)", "0.50002)"))
    pages.make("lesson")
    assert pages.ran == ["en", "en"]
    assert outputs(pages.notebook("en"))[2] == ["two 0.50002\n"]


@pytest.mark.parametrize(
    "change",
    [
        {"status": "FAIL"},
        {"fingerprint": "older"},
        {"inputs": "older"},
        {"versions": {"python": "3.99.0", "torch": "2.0"}},
        {"blocks": []},
        {"blocks": [{"printed": text, "figures": []} for text in ("one\n", "two 0.6\n", "")]},
        {"blocks": [{"printed": "", "figures": ["gone.svg"]}, {"printed": "two 0.5", "figures": []},
                    {"printed": "", "figures": []}]},
    ],
)  # fmt: skip
def test_a_record_that_does_not_fit_is_not_used(pages, change) -> None:
    pages.write("lesson", PYTHON)
    pages.make("lesson")
    pages.records.write(pages.records.find("cpu", "en", "lesson") | change, {})
    pages.make("lesson")
    assert pages.ran == ["en", "en"]


def test_another_build_of_the_same_versions_makes_no_difference(pages) -> None:
    pages.write("lesson", page("print(1)"))
    pages.make("lesson")
    record = pages.records.find("cpu", "en", "lesson")
    versions = record["versions"]
    python, torch = f"{versions['python'].rpartition('.')[0]}.99", f"{versions['torch'].partition('+')[0]}+other"
    pages.records.write(record | {"versions": versions | {"python": python, "torch": torch}})
    pages.make("lesson")
    assert pages.ran == ["en"]


def test_other_words_in_the_code_are_another_run(pages) -> None:
    pages.write("lesson", page("x = 1\nprint('hello')"), "en")
    pages.write("lesson", page("x = 1\nprint('你好')").replace("# T", "# 课"), "zh-Hans")
    pages.make("lesson")
    assert pages.ran == ["en", "zh-Hans"]
    assert outputs(pages.notebook("zh-Hans")) == [[], ["你好\n"]]
    assert pages.notebook("zh-Hans").cells[0].source.startswith("# 课\n\n*本笔记本由")


def test_a_page_that_fails_has_no_notebook(pages) -> None:
    pages.write("lesson", page("def inner(x):\n    return 1 // x\n\n\ninner(1)\ninner(0)"))
    older = pages.folder / "notebooks/en/lesson.ipynb"
    older.parent.mkdir(parents=True)
    older.write_text("of a page that did not fail")
    english, chinese = pages.make("lesson")
    assert (english.status, chinese.status) == ("FAIL", "FAIL")
    assert (english.result.failure.line, english.result.failure.message) == (
        5, "ZeroDivisionError: integer division or modulo by zero"
    )  # fmt: skip
    assert not older.exists()


def test_a_warning_that_readers_would_see_is_a_failure(pages, executions) -> None:
    pages.write("lesson", page("import warnings\nwarnings.warn('old', stacklevel=1)"))
    english, _ = pages.make("lesson", execute=True)
    assert english.failure == CellFailure(5, "UserWarning: old: correct what causes it")
    assert not executions
    assert not pages.builder().notebook_file(english.page).exists()


# ------------------------------------------------------------------------------------------ executed notebooks


@pytest.mark.parametrize("text", [PYTHON, TORCHRUN])
def test_an_executed_notebook_shows_what_the_page_s_run_did(pages, text) -> None:
    pages.write("lesson", text)
    english, chinese = pages.make("lesson", execute=True)
    assert (english.status, chinese.status) == ("PASS", "PASS"), english.failure
    assert english.execution
    assert chinese.execution is None
    assert outputs(pages.notebook("en")) == outputs(pages.notebook("zh-Hans"))
    assert not kernels()


ONLY_IN_A_SCRIPT = {
    "another line": ("print(1 if '__file__' in globals() else 2)", "this cell prints `2` where the page's run"),
    "no line": (
        "print('a' if '__file__' in globals() else '')",
        "this cell prints nothing, and the page's run",
    ),
    "one line more": ("print('' if '__file__' in globals() else 'a')", "this cell prints `a`, and the page's run"),
}


@pytest.mark.parametrize(("code", "message"), ONLY_IN_A_SCRIPT.values(), ids=ONLY_IN_A_SCRIPT)
def test_a_cell_that_prints_something_else_is_a_failure(pages, code, message) -> None:
    shown = "\n\n```text output\n1\n```" if "print(1" in code else ""
    pages.write("lesson", page(code).replace("\n```\n\n<", f"\n```{shown}\n\n<"))
    english, _ = pages.make("lesson", execute=True)
    assert (english.status, english.failure.line) == ("FAIL", 4)
    assert message in english.failure.message
    assert not pages.builder().notebook_file(english.page).exists()


def test_a_figure_that_the_notebook_does_not_show_is_a_failure(pages) -> None:
    code = f"from pathlib import Path\nif {IN_A_SCRIPT}:\n    Path('a.svg').touch()\nx = 1"
    pages.write("lesson", page(code))
    english, _ = pages.make("lesson", execute=True)
    assert english.failure == CellFailure(4, "this cell shows 0 drawings of the 1 that the page's run drew")


def test_several_ranks_must_print_the_same_too(pages) -> None:
    pages.write("lesson", TORCHRUN)
    pages.make("lesson")
    record = pages.records.find("cpu", "en", "lesson")
    record["blocks"][0]["printed"] = ""
    figures = {name: pages.records.figure(record, name).read_bytes() for name in ("a.svg", "b.png")}
    pages.records.write(record, figures)
    english, _ = pages.make("lesson", execute=True)
    assert "this cell prints `one` where the page's run printed `two 0.5001`" in english.failure.message


def test_a_page_without_code_is_a_notebook_all_the_same(pages) -> None:
    pages.write("lesson", "# T\n\nWords.\n\n<!-- doc-test-command: none -->\n")
    made = pages.make("lesson")
    assert [one.status for one in made] == ["NONE", "NONE"]
    assert all(pages.builder().notebook_file(one.page).is_file() for one in made)


# ------------------------------------------------------------------------------------------ failures


def test_a_kernel_that_dies_is_a_failure(pages) -> None:
    pages.write("lesson", page(f"import os\n{IN_A_SCRIPT} or os._exit(1)"))
    english, _ = pages.make("lesson", execute=True)
    assert english.failure.line == 4
    assert english.failure.message.startswith("the notebook could not be executed: ")
    assert not kernels()


def test_a_failure_of_several_ranks_is_named_by_the_line_of_the_page(pages) -> None:
    code = "import os\n\nassert os.environ['RANK'] == '0' or 'COLOSSAL_PAGE_RUN' in os.environ, 'on rank 1'\n"
    pages.write("lesson", page(code, "torchrun --standalone --nproc_per_node=2 lesson.py"))
    english, _ = pages.make("lesson", execute=True)
    assert (english.failure.line, english.failure.message) == (6, "AssertionError: on rank 1")


def test_a_notebook_that_takes_too_long_is_ended_with_all_its_processes(pages) -> None:
    pages.write("lesson", f"# T\n\n```python\nx = 1\n```\n\n```python\nwhile not ({IN_A_SCRIPT}):\n    pass\n```\n\n"
                "<!-- doc-test-command: python lesson.py -->\n")  # fmt: skip
    for limit_seconds in (6.0, 24.0, 96.0):
        english, _ = pages.make("lesson", limit_seconds, execute=True)
        if english.failure.line != BEFORE_THE_KERNEL_WAS_UP:
            break
    assert english.failure.line == 8
    assert f"the notebook took longer than {limit_seconds:.0f} s" in english.failure.message
    assert not kernels()


def test_a_process_that_stays_behind_is_a_failure(pages) -> None:
    time = f"'0' if {IN_A_SCRIPT} else '60'"
    code = f"import subprocess\nchild = subprocess.Popen(['sleep', {time}], start_new_session=True)\n"
    pages.write("lesson", page(code))
    english, _ = pages.make("lesson", execute=True)
    assert "the notebook left processes running" in english.failure.message
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
    assert not pages.ran


# ------------------------------------------------------------------------------------------ the front door


def test_the_front_door_executes_a_page(pages, tmp_path) -> None:
    pages.write("basics/lesson", ONE)
    (tmp_path / "api.json").write_text(json.dumps({"version": "0", "objects": {}}))
    words = ["notebooks", "lesson", "--source", "source", "--build", "pages", "--output", "out", "--api", "api.json"]
    command = [sys.executable, str(ROOT / "docs_build.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("en      basics/lesson   PASS  cells 3/3")
    date = Records(tmp_path / "verified").find("cpu", "en", "basics/lesson")["date"]
    assert lines[1:] == [
        f"zh-Hans basics/lesson   PASS  run of en, {date}", "2 with recorded outputs, 1 of them executed, 0 failed"
    ]  # fmt: skip
    assert (
        nbformat.read(tmp_path / "out/en/basics/lesson.ipynb", as_version=4).metadata.colossal.page == "basics/lesson"
    )


def test_a_few_notebooks_are_executed_or_all(pages, executions, tmp_path, capsys) -> None:
    for number in range(4):
        pages.write(f"lesson_{number}", f"# T\n\n```python\nx = {number}\n```\n\n"
                    f"<!-- doc-test-command: python lesson_{number}.py -->\n")  # fmt: skip
    (tmp_path / "api.json").write_text(json.dumps({"version": "0", "objects": {}}))
    places = {"source": "source", "build": "pages", "output": "out", "api": "api.json"}
    words = [word for option, name in places.items() for word in (f"--{option}", str(pages.folder / name))]
    assert cli.main(["notebooks", *words], ROOT) == 0
    assert capsys.readouterr().out.endswith("8 with recorded outputs, 2 of them executed, 0 failed\n")
    assert cli.main(["notebooks", "--execute-all", *words], ROOT) == 0
    assert capsys.readouterr().out.endswith("8 with recorded outputs, 4 of them executed, 0 failed\n")
    assert executions == ["en"] * 6


def test_a_sample_is_the_same_everywhere_and_another_for_another_purpose() -> None:
    names = [f"page_{number}" for number in range(40)]
    chosen = sample(names, "pages", 3)
    assert chosen == {"page_12", "page_16", "page_29"}
    assert chosen == sample(reversed(names), "pages", 3)
    assert chosen != sample(names, "other pages", 3)
    assert sample(names[:2], "pages", 3) == frozenset(names[:2])


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
