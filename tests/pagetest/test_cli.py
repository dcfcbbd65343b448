"""The front door: exit codes, the report, the record, pairs, facts about a run."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"en {6}basics/lesson   PASS  cpu x1  \d+\.\d s  peak \d+\.\d\d GB  lines 3/3\n")
CODE = "x = 1\ny = 2\nprint(x + y)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lesso"], "no page is called `lesso`; the nearest: basics/lesson"),
        ([], "give the name of a page, or --all"),
        (["lesson", "--all"], "give one of names, --changed, --all and --affected"),
        (["--changed", "--all"], "give one of names, --changed, --all and --affected"),
    ],
)
def test_a_wrong_name_is_a_usage_error(docs, capsys, words, message) -> None:
    docs.add("basics/lesson", CODE)
    assert docs.main(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--lang", "fr"], ["--timeout", "0"], ["--timeout", "soon"], ["--none"]])
def test_a_wrong_option_is_a_usage_error(docs, words) -> None:
    docs.add("basics/lesson", CODE)
    with pytest.raises(SystemExit, match="2"):
        docs.main("lesson", *words)


def test_an_empty_tree_is_a_usage_error(docs, capsys) -> None:
    assert docs.main("--check") == 2
    assert "holds no page" in capsys.readouterr().err


def test_a_page_passes_and_its_translation_is_credited(docs) -> None:
    docs.add("basics/lesson", CODE)
    done = docs.run("lesson")
    assert done.returncode == 0
    assert LINE.match(done.stdout), done.stdout
    assert done.stdout.split("\n")[1:] == [
        "zh-Hans basics/lesson   SAME  code identical to en",
        "2 passed, 0 failed",
        "",
    ]
    assert done.stderr == ""
    assert (docs.build / "en/basics/lesson/log.txt").read_text() == "3\n"
    assert not (docs.build / "zh-Hans").exists()


def test_a_translation_alone_is_run(docs) -> None:
    docs.add("basics/lesson", CODE)
    done = docs.run("basics/lesson.md", "--lang", "zh-Hans")
    assert done.returncode == 0
    assert "zh-Hans basics/lesson   PASS" in done.stdout
    assert done.stdout.endswith("\n1 passed, 0 failed\n")


def test_a_translation_that_prints_other_words_runs_too(docs) -> None:
    docs.add("lesson", "print('result')")
    docs.add("lesson", "print('结果')", languages=("zh-Hans",))
    done = docs.run("lesson")
    assert done.stdout.count("PASS") == 2
    assert (docs.build / "zh-Hans/lesson/log.txt").read_text(encoding="utf-8") == "结果\n"


def test_a_translation_with_other_code_fails(docs) -> None:
    docs.add("lesson", "x = 1")
    docs.add("lesson", "x = 2", languages=("zh-Hans",))
    done = docs.run("lesson")
    assert done.returncode == 1
    assert "zh-Hans/lesson.md:5: the first code that differs from" in done.stdout
    assert done.stdout.endswith("\n1 passed, 1 failed\n")


def test_a_missing_translation_fails(docs) -> None:
    docs.add("lesson", "x = 1", languages=("en",))
    done = docs.run("lesson")
    assert done.returncode == 1
    assert "every page exists in en and zh-Hans" in done.stdout


def test_a_page_without_code_is_neither_passed_nor_failed(docs, capsys) -> None:
    docs.write("prose", "# Title\n\n<!-- doc-test-command: none -->\n")
    assert docs.main("prose") == 0
    assert capsys.readouterr().out.endswith("\n0 passed, 0 failed\n")


def test_a_page_that_is_not_run_says_why(docs, capsys) -> None:
    ignored = "<!--- doc-test-ignore-start: needs 8 GPUs -->\n```python\nx = 1\n```\n<!--- doc-test-ignore-end -->\n"
    docs.write("big", f"{ignored}<!-- doc-test-command: none -->\n")
    assert docs.main("big", "--lang", "en") == 0
    assert "NONE  not run: needs 8 GPUs" in capsys.readouterr().out


def test_a_refused_page_is_not_run(docs, capsys) -> None:
    docs.add("lesson", "x = 1", "echo lesson.py")
    assert docs.main("lesson", "--lang", "en") == 1
    assert "lesson.md:8: `echo` does not run the page's code" in capsys.readouterr().out
    assert not docs.build.exists()


def test_the_other_pages_still_run_after_a_failure(docs) -> None:
    docs.add("a", "raise ValueError")
    docs.add("b", "x = 1")
    assert docs.run("--all").stdout.endswith("\n2 passed, 2 failed\n")


LIVE = """# Lesson

```python
print("first")
```

## Not run

Text.

## Group

### Part

```python
import sys
from pathlib import Path

Path("curve.svg").write_text("<svg/>")
print("loss 2.30 -> 0.10 中", end="")
print("not the page's own", file=sys.stderr)
```

```python
print("!")
```

## Last

```python
sys.stdout.write("no line end")
```

<!-- doc-test-command: python lesson.py -->
"""


def in_terminal(docs, *words: str, **environment: str) -> list[str]:
    """What the front door writes into a terminal, without its control sequences."""
    ours, theirs = pty.openpty()
    command = [sys.executable, str(ROOT / "docs_test.py"), *docs.arguments(*words)]
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", **environment}
    )
    os.close(theirs)
    data = b""
    with suppress(OSError):  # Linux says so when no one holds the other end any more
        while chunk := os.read(ours, 4096):
            data += chunk
    os.close(ours)
    assert process.wait() == 0
    return [re.sub(r"\x1b\[\d*m", "", line) for line in data.decode().split("\r\n")]


def test_a_terminal_shows_one_page_as_it_runs(docs) -> None:
    docs.write("lesson", LIVE)
    figure = docs.build / "en/lesson/curve.svg"
    shown = in_terminal(docs, "lesson")
    assert [line for line in shown[:-5] if line] == [
        "# Lesson",
        "first",
        "## Group",
        "### Part",
        "loss 2.30 -> 0.10 中",
        f"figure: {figure}",
        "!",
        "## Last",
        "no line end",
    ]
    assert shown[-5] == ""
    assert shown[-4].startswith("en      lesson   PASS  cpu x1")
    assert shown[-3:] == ["zh-Hans lesson   SAME  code identical to en", "2 passed, 0 failed", ""]


@pytest.mark.parametrize(
    ("words", "environment"),
    [(["lesson", "--quiet"], {}), (["lesson", "other"], {}), (["lesson"], {"TERM": "dumb"})],
)
def test_a_terminal_shows_lines_alone(docs, words, environment) -> None:
    docs.write("lesson", LIVE)
    docs.add("other", CODE)
    pages = [word for word in words if not word.startswith("-")]
    shown = in_terminal(docs, *words, **environment)
    assert len(shown) == 2 * len(pages) + 2
    assert shown[0].startswith("en      lesson")


def test_output_in_pieces_of_a_character_is_shown_whole(docs) -> None:
    docs.add("lesson", "import os, time\nos.write(1, b'\\xe4\\xb8')\ntime.sleep(0.4)\nos.write(1, b'\\xad\\n')")
    assert "中" in in_terminal(docs, "lesson")


def test_verbose_shows_what_the_page_prints(docs) -> None:
    docs.add("lesson", "print('hello')")
    assert docs.run("lesson", "-v").stdout.startswith("hello\n")


def test_list_shows_pages_and_commands(docs, capsys) -> None:
    docs.add("basics/lesson", CODE)
    docs.add("other", CODE, "echo other.py", languages=("en",))
    assert docs.main("--list") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["basics/lesson", "en", "zh-Hans", "checked", "python", "lesson.py"]
    assert second.split() == ["other", "en", "2", "findings", "echo", "other.py"]


def test_the_record_holds_the_facts(docs) -> None:
    docs.add("lesson", "x = 1\nraise ValueError('boom')")
    docs.run("lesson")
    entry, other = docs.records.read()
    assert entry["page"] == "lesson"
    assert (entry["lang"], other["lang"]) == ("en", "zh-Hans")
    assert entry["status"] == "FAIL"
    assert entry["command"] == "python lesson.py"
    assert (entry["device"], entry["backend"], entry["world"]) == ("cpu", "", 1)
    assert (entry["lines_run"], entry["lines_total"]) == (2, 2)
    assert entry["seconds"] > 0
    assert entry["code_hash"] == other["code_hash"]
    assert {"commit", "versions", "peak_bytes"} <= entry.keys()
    assert entry["error"]["line"] == 6
    assert entry["error"]["rank"] == 0
    assert entry["error"]["message"] == "ValueError: boom"
    assert entry["error"]["file"].endswith("en/lesson.md")


def test_backend_world_and_ranks_are_facts_even_if_the_group_is_gone(docs) -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == 2
dist.destroy_process_group()
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=512, store=FakeStore())  # only pretended: no fact
dist.destroy_process_group()
"""
    docs.add("lesson", code, "torchrun --standalone --nproc_per_node=2 lesson.py")
    done = docs.run("lesson")
    assert done.returncode == 0, done.stdout
    assert "PASS  cpu gloo x2  " in done.stdout
    assert docs.records.read()[0]["peak_bytes"] > 200e6


def test_lines_that_run_in_spawned_and_forked_workers_count(docs) -> None:
    code = """
import multiprocessing as mp
def spawned(x):
    y = x + 1
    z = y + 1
def forked(x):
    y = x + 1
    z = y + 1
if __name__ == "__main__":
    for method, target in (("spawn", spawned), ("fork", forked)):
        worker = mp.get_context(method).Process(target=target, args=(1,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
"""
    docs.add("lesson", code)
    done = docs.run("lesson", "--lang", "en")
    assert done.returncode == 0, done.stdout
    assert "lines 13/13" in done.stdout


def test_two_runs_of_one_page_wait_for_each_other(docs) -> None:
    docs.add(
        "lesson", "import time\nopen('mine', 'x').close()\ntime.sleep(0.5)\nassert open('mine')", languages=("en",)
    )
    command = [sys.executable, str(ROOT / "docs_test.py"), *docs.arguments("lesson", "--lang", "en")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate()[0].splitlines()[-1] for run in runs] == ["1 passed, 0 failed"] * 2


def test_checking_needs_neither_torch_nor_psutil(docs) -> None:
    body = "\n".join(f"def step_{number}(x):\n    return [x + {number}, str(x)]\n" for number in range(40))
    for number in range(40):
        docs.add(f"part/lesson_{number}", body)
    heavy = "import runpy, sys; sys.modules.update(torch=None, psutil=None, numpy=None); del sys.argv[0]; "
    command = [sys.executable, "-c", heavy + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    done = subprocess.run(
        [*command, str(ROOT / "docs_test.py"), *docs.arguments("--check")], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("40 pages checked, 0 findings\n"), done.stdout + done.stderr


def test_pages_of_one_stem_run_in_folders_of_their_own(docs) -> None:
    docs.add("basics/run_demo", "import os\nassert sorted(os.listdir()) == ['log.txt', 'run_demo.py']")
    docs.add("features/run_demo", "import os\nassert sorted(os.listdir()) == ['log.txt', 'run_demo.py']\nx = 1")
    assert docs.run("--all").stdout.endswith("4 passed, 0 failed\n")


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["python", "torchrun --standalone --nproc_per_node=1"])
def test_a_page_that_uses_cuda_is_reported_as_such(docs, launch) -> None:
    code = """
import os, torch
import torch.distributed as dist
"RANK" in os.environ and dist.init_process_group()
assert torch.ones(1, device="cuda").item() == 1
"""
    docs.add("lesson", code, f"{launch} lesson.py")
    done = docs.run("lesson", "--lang", "en")
    assert f"PASS  cuda {'nccl ' if launch.startswith('torchrun') else ''}x1  " in done.stdout


def test_a_python_without_the_harness_s_packages_is_told_what_to_install() -> None:
    bare = [sys.executable, "-I", "-S", str(ROOT / "docs_test.py"), "--list"]
    done = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs the package markdown_it" in done.stderr
    assert "pip install -c constraints.txt -e '.[docs]'" in done.stderr
