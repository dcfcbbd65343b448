"""The pool: pages that run at the same time, the order of their results, and what is left when they are stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest

from pagetest import cli
from pagetest.limits import scaled
from pagetest.model.tree import LANGUAGES, Tree
from pagetest.pool import WorkerPool
from pagetest.run.runner import Runner
from pagetest.suite import Suite

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DIARY = "import time\nwith open({!r}, 'a') as diary:\n    diary.write({!r} + '\\n')\n"
SLEEPS = "import subprocess, time\nchild = subprocess.Popen(['sleep', '987'], start_new_session=True)\ntime.sleep(1000)"


@pytest.fixture
def pool(docs) -> WorkerPool:
    suite = Suite(Tree(docs.source), LANGUAGES, ROOT / "src")
    return WorkerPool(suite, Runner(ROOT, docs.build, scaled(600)), 2, slots=4)


def noted(docs, name: str, wait_for: str = "", alone: bool = False) -> None:
    """A page that writes its name into a diary, waits until another one has written there, and writes it again."""
    diary = str(docs.source.parent / "diary")
    note = DIARY.format(diary, name)
    waiting = f"while {wait_for!r} not in open({diary!r}).read(): pass\n" if wait_for else ""
    text = docs.markdown(name, f"{note}{waiting}{note}")
    docs.write(name, f"<!-- doc-test-alone: it measures time -->\n\n{text}" if alone else text)


def entries(docs) -> list[str]:
    return (docs.source.parent / "diary").read_text().split()


def test_two_pages_run_at_the_same_time(docs, pool) -> None:
    """Neither ends before the other one has begun, and the results keep their order whichever ends first."""
    noted(docs, "a", wait_for="b")
    noted(docs, "b", wait_for="a")
    results = list(pool.run(["a", "b"]))
    assert [(result.name, result.language, result.status) for result in results] == [
        ("a", "en", "PASS"), ("a", "zh-Hans", "SAME"), ("b", "en", "PASS"), ("b", "zh-Hans", "SAME")
    ]  # fmt: skip


def test_results_come_in_order_whichever_page_ends_first(docs, pool) -> None:
    noted(docs, "a", wait_for="c")
    noted(docs, "b")
    noted(docs, "c")
    assert [result.name for result in pool.run(["a", "b", "c"])] == ["a", "a", "b", "b", "c", "c"]


def test_a_page_that_asks_for_it_runs_alone(docs, pool) -> None:
    for name in "abcd":
        noted(docs, name, alone=name == "c")
    assert pool.start_order(["a", "b", "c", "d"]) == ["c", "a", "b", "d"]
    assert all(result.status in {"PASS", "SAME"} for result in pool.run(["a", "b", "c", "d"]))
    assert entries(docs)[:2] == ["c", "c"]


def test_pages_with_many_ranks_come_first(docs, pool) -> None:
    ranks = {"one": 0, "two": 2, "three": 3, "four": 4, "eight": 8}
    for name, count in ranks.items():
        launch = f"torchrun --standalone --nproc_per_node={count}" if count else "python"
        docs.add(name, "x = 1", f"{launch} {name}.py")
    docs.add("broken", "x = 1", "python 'broken.py")
    assert {name: pool.num_slots(name) for name in (*ranks, "broken")} == {
        "one": 1, "two": 2, "three": 3, "four": 4, "eight": 4, "broken": 1
    }  # fmt: skip
    assert pool.start_order(["broken", *ranks]) == ["four", "eight", "three", "two", "broken", "one"]


def test_whoever_runs_a_page_takes_as_many_slots(docs) -> None:
    taken: list[int] = []

    def gate(ranks: int) -> AbstractContextManager[None]:
        taken.append(ranks)
        return nullcontext()

    suite = Suite(Tree(docs.source), ("en",), ROOT / "src")
    noted(docs, "a")
    noted(docs, "b", alone=True)
    assert all(
        result.status == "PASS"
        for result in suite.run(["a", "b"], Runner(ROOT, docs.build, scaled(600), acquire_slots=gate))
    )
    assert taken == [1, sys.maxsize]


def test_a_request_to_run_alone_says_why_and_is_translated(docs, capsys) -> None:
    page = docs.markdown("lesson", "x = 1")
    docs.write("lesson", f"{page}\n<!-- doc-test-alone -->\n", "en")
    docs.write("lesson", page, "zh-Hans")
    assert docs.main("--check") == 1
    out = capsys.readouterr().out
    assert "en/lesson.md:10: a page that runs alone says why" in out
    assert "the first request to run alone that differs from" in out


def test_the_front_door_runs_all_pages_so_and_named_ones_one_by_one(docs) -> None:
    noted(docs, "a", wait_for="b")
    noted(docs, "b")
    done = docs.run("--all")
    assert done.stdout.endswith("4 passed, 0 failed\n"), done.stdout
    assert re.findall(r"^en +(\w)", done.stdout, re.MULTILINE) == ["a", "b"]
    docs.source.parent.joinpath("diary").unlink()
    assert re.search(r"no end after \d+ s", docs.run("a", "b", "--timeout", "3").stdout)
    assert docs.run("a", "b", "--jobs", "2").returncode == 0
    with pytest.raises(SystemExit, match="2"):
        docs.main("--all", "--jobs", "0")


# ------------------------------------------------------------------------------------------ the end of a run


def start(docs) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Starts two pages that sleep; returns the harness and all processes below it, once the pages' own are there."""
    for name in ("a", "b"):
        docs.add(name, SLEEPS, languages=("en",))
    command = ["env", "--default-signal=INT", sys.executable, str(ROOT / "docs_test.py")]
    words = docs.arguments("--all", "--lang", "en")
    harness = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + scaled(120)
    while time.monotonic() < deadline:
        below = psutil.Process(harness.pid).children(recursive=True)
        if sum(_words(process) == ["sleep", "987"] for process in below) == 2:
            return harness, below
        time.sleep(0.05)
    harness.kill()
    raise AssertionError("the pages did not start")


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_for_end(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a while; a zombie of the machine's first process counts as gone."""
    _, alive = psutil.wait_procs(processes, timeout=scaled(120))
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_harness_ends_the_pages(docs, number) -> None:
    harness, below = start(docs)
    harness.send_signal(number)
    if number != signal.SIGKILL:
        assert harness.wait(scaled(120)) == cli.INTERRUPTED
        assert harness.communicate()[1] == "interrupted; the page's processes are gone\n"
    assert wait_for_end(below) == []
    harness.communicate()


def test_an_interruption_from_the_terminal_reaches_all_processes_at_once(docs) -> None:
    harness, below = start(docs)
    for process in [process for process in below if "docs_test.py" in " ".join(_words(process))]:
        os.kill(process.pid, signal.SIGINT)
    harness.send_signal(signal.SIGINT)
    assert harness.wait(scaled(120)) == cli.INTERRUPTED
    assert wait_for_end(below) == []
    harness.communicate()


def test_a_process_of_the_pool_that_is_killed_leaves_nothing_behind_and_fails_its_page_alone(docs) -> None:
    docs.add("c", "x = 1", languages=("en",))
    harness, below = start(docs)
    workers = [
        process for process in psutil.Process(harness.pid).children() if "docs_test.py" in " ".join(_words(process))
    ]
    for worker in workers:
        worker.kill()
    out, error = harness.communicate(timeout=scaled(120))
    assert harness.returncode == 1
    reason = "the process that ran this page ended with -9: a page must not signal what runs it"
    assert len(re.findall(rf"^FAIL  docs_test.py [ab] .*: {reason}$", out, re.MULTILINE)) == 2
    assert re.search(r"^en +c +PASS", out, re.MULTILINE)
    assert out.endswith("1 passed, 2 failed\n")
    assert error == ""
    assert wait_for_end(below) == []
