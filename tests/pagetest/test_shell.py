"""Transcripts and files: one shell runs them before the program, and what it prints is compared."""

import re
from subprocess import CompletedProcess

import pytest

from pagetest.checks.parity import compare_structure
from pagetest.checks.rules import check_page
from pagetest.model.script import make_script
from pagetest.results.records import Records

pytestmark = pytest.mark.slow

COMMAND = "\n<!-- doc-test-command: {} -->\n"
TRANSCRIPT = """# Title

```python file=hello.py
import sys

print("hello", *sys.argv[1:])
```

```shell run
NAME=world
python hello.py "$NAME"
```

```text output
hello world
```

```python
from pathlib import Path

text = Path("hello.py").read_text()
print(len(text.splitlines()))
```

```text output
3
```

```shell run
echo "again, $NAME" | tee hello.txt
false || echo "exit code $?"
```

```text output
again, world
exit code 1
```
"""


def run(docs, text: str, command: str = "python lesson.py", *words: str) -> CompletedProcess[str]:
    docs.write("lesson", text + COMMAND.format(command))
    return docs.run("lesson", *words)


def test_files_are_written_and_one_shell_runs_all_before_the_program(docs) -> None:
    done = run(docs, TRANSCRIPT)
    assert done.returncode == 0, done.stdout
    assert "outputs 3/3" in done.stdout
    assert "SAME  code identical to en" in done.stdout
    assert (docs.build / "en" / "lesson" / "hello.txt").read_text() == "again, world\n"
    assert (docs.build / "en" / "lesson" / "log.txt").read_text().splitlines() == [
        "hello world",
        "again, world",
        "exit code 1",
        "3",
    ]
    record = docs.records.find("cpu", "en", "lesson")
    assert [block["printed"] for block in record["blocks"]] == ["hello world\n", "3\n", "again, world\nexit code 1\n"]


def test_a_page_may_have_transcripts_only(docs) -> None:
    done = run(docs, "# Title\n\n```shell run\necho done\n```\n\n```text output\ndone\n```\n", "none")
    assert done.returncode == 0, done.stdout
    assert "lines 1/1  outputs 1/1" in done.stdout
    assert isinstance(docs.records, Records)
    assert docs.records.find("cpu", "en", "lesson")["device"] == "cpu"


@pytest.mark.parametrize(
    ("shell", "line", "message"),
    [
        ("echo a\necho b >&2; false", 5, "this command ended with exit code 1: b"),
        ("f() { false; }\nf", 4, "this command ended with exit code 1"),
        ("echo $((", 4, "this command ended with exit code"),
        ("no_such_command", 4, "this command ended with exit code 127: "),
        ("false | cat", 4, "this command ended with exit code 1"),
        ("exit 3", 4, "this command ended with exit code 3"),
        ("kill -9 $$", 4, "this command was killed by SIGKILL"),
        ("sleep 100 & disown", 4, "a process outlived the shell and was killed: sleep 100"),
        ("python -c 'import urllib.request as r; r.urlopen(\"http://example.org\", timeout=60)'", 4, "URLError"),
    ],
)
def test_a_command_that_fails_fails_the_page_at_its_line(docs, shell, line, message) -> None:
    docs.write("lesson", f"# Title\n\n```shell run\n{shell}\n```\n" + COMMAND.format("none"))
    done = docs.run("lesson", "--lang", "en")
    assert done.returncode == 1
    (found,) = [text for text in done.stdout.splitlines() if text.startswith(str(docs.source))]
    assert f"lesson.md:{line}: " in found
    assert message in found


def test_a_command_that_hangs_is_ended_at_its_line(docs) -> None:
    docs.write("lesson", "# Title\n\n```shell run\nsleep 1000\n```\n" + COMMAND.format("none"))
    printed = ""
    for limit in (2, 20, 100):  # a busy machine needs longer to get there
        printed = printed if "lesson.md:4: " in printed else docs.run("lesson", "--timeout", str(limit)).stdout
    assert re.search(r"lesson.md:4: no end after \d+ s, killed", printed)


def test_other_output_is_stale_and_can_be_renewed(docs) -> None:
    wrong = TRANSCRIPT.replace("hello world\n", "hello moon\n")
    done = run(docs, wrong)
    assert done.returncode == 1
    assert "lesson.md:15: the block at line 10 was expected to print `hello moon` here and printed `hello world`" in (
        done.stdout
    )
    done = run(docs, wrong, "python lesson.py", "--update-outputs")
    assert done.returncode == 0, done.stdout
    assert (docs.source / "en" / "lesson.md").read_text() == TRANSCRIPT + COMMAND.format("python lesson.py")


def test_a_program_that_fails_after_its_transcript_is_told_at_its_line(docs) -> None:
    done = run(docs, TRANSCRIPT.replace("print(len(text.splitlines()))", "assert not text"), "python lesson.py")
    assert done.returncode == 1
    assert "lesson.md:22: AssertionError" in done.stdout


def test_the_shell_finds_neither_the_probe_nor_the_root(docs) -> None:
    shell = "env | grep -c ^COLOSSAL_PAGE || true\n(python -c 'import pagetest' || true) 2>&1 | tail -1"
    shown = "0\nModuleNotFoundError: No module named 'pagetest'"
    text = f"# T\n\n```shell run\n{shell}\n```\n\n```text output\n{shown}\n```\n"
    done = run(docs, text, "none")
    assert done.returncode == 0, done.stdout


FILE = "```python file={}\nx = 1\n```\n\n```shell run\npython {}\n```\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("```python verify\nx = 1\n```\n", 1, "`python verify` is no kind of code: write `python`, `python check`"),
        ("```python check figure\nx = 1\n```\n", 1, "`python check figure` is no kind of code"),
        ("```shell ran\nls\n```\n", 1, "`shell ran` is no kind of code: write `shell run`"),
        (FILE.format("/there/a.py", "/there/a.py"), 1, "`/there/a.py` is no file below the page's folder"),
        (FILE.format("../a.py", "../a.py"), 1, "is no file below the page's folder"),
        (FILE.format("a.txt", "a.txt"), 1, "is no file below the page's folder"),
        (FILE.format("lesson.py", "lesson.py"), 1, "`lesson.py` is the program of the page"),
        (FILE.format("a.py", "b.py"), 1, "nothing runs `a.py`"),
        ("```python file=a.py\nx =\n```\n\n```shell run\npython a.py\n```\n", 2, "SyntaxError"),
        ("```python file=a.py\nx = 1\n```\n\n```text output\n1\n```\n", 5, "`a.py` is written, not run"),
        ("```shell run\nls\n```\n\n```text\na\n```\n", 5, "reads as its output, but is not compared"),
    ],
)
def test_what_is_no_transcript_is_refused(parse, text, line, message) -> None:
    page = parse(text)
    found = [(finding.line, finding.message) for finding in check_page(page, make_script(page))]
    assert any(where == line and message in what for where, what in found), found


def test_a_translation_has_the_same_roles_files_and_commands(parse) -> None:
    original = parse(TRANSCRIPT)
    assert compare_structure(original, parse(TRANSCRIPT, language="zh-Hans")).same_code
    commented = TRANSCRIPT.replace("NAME=world", "# the name\nNAME=world")
    assert compare_structure(original, parse(commented, language="zh-Hans")).same_code
    for change in (
        ("file=hello.py", "file=hallo.py"),
        ("```python\nfrom", "```python check\nfrom"),
        ("=world", "=moon"),
    ):
        found = compare_structure(original, parse(TRANSCRIPT.replace(*change), language="zh-Hans"))
        assert not found.same_code
        assert found.findings, change
