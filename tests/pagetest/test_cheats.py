"""Pages that do not prove what they show. None may pass, and each message names the line."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pagetest.limits import VARIABLE, scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TWO_RANKS = "torchrun --standalone --nproc_per_node=2 lesson.py"

CHEATS = {
    "raises": ("x = 1\nraise ValueError('boom')", 6, "ValueError: boom"),
    "raises in a function": ("def f():\n    return 1 / 0\n\nf()", 6, "ZeroDivisionError"),
    "expects an error that does not come": (
        "from colossal.testing import expect_error\nwith expect_error(ValueError, OSError):\n    x = 1",
        6,
        "AssertionError: This must raise ValueError or OSError. Found that it ended without an error.",
    ),
    "exits through sys.exit": ("import sys\nsys.exit(3)", 6, "SystemExit: 3"),
    "raises SystemExit": ("x = 1\nraise SystemExit(3)", 6, "SystemExit: 3"),
    "exits with a text": ("x = 1\nraise SystemExit('no')", 6, "SystemExit: no"),
    "exits through os._exit": ("import os\nos._exit(3)", 6, "os._exit(3)"),
    "exits through exit()": ("x = 1\nexit(3)", 6, "SystemExit: 3"),
    "kills itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", 6, "os.kill"),
    "is terminated": ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", 6, "SIGTERM"),
    "aborts": ("import os\nos.abort()", 6, "os.abort()"),
    "crashes": ("import ctypes\nctypes.string_at(0)", 6, "fatal signal"),
    "has a syntax error": ("x = 1\nif x\n    pass", 6, "SyntaxError"),
    "returns outside a function": ("x = 1\nreturn", 6, "SyntaxError"),
    "never calls its function": ("def f():\n    a = 1\n    b = 2\n    return a + b", 6, "never ran: 6, 7, 8"),
    "stops early without an error": (
        "import os\nos._exit(0)\na = 1\nb = 2\nc = 3",
        6,
        "os._exit(0): the page ends here, before its last statement",
    ),
    "exits 0 early": (
        "import sys\nsys.exit()\na = 1\nb = 2\nc = 3",
        6,
        "SystemExit: the page ends here, before its last statement",
    ),
    "hides the error behind an atexit hook": (
        "import atexit, os\natexit.register(lambda: os._exit(0))\na = 1\nraise ValueError('boom')\nb = 1",
        8,
        "ValueError: boom",
    ),
}


@pytest.mark.parametrize(("code", "line", "message"), CHEATS.values(), ids=CHEATS)
def test_a_page_that_proves_nothing_fails_at_its_line(docs, code, line, message) -> None:
    docs.add("lesson", code)
    done = docs.run("lesson")
    assert done.returncode == 1, done.stdout
    assert done.stdout.endswith("0 passed, 2 failed\n")
    assert f"lesson.md:{line}: " in done.stdout
    assert f"\n  > {line:>4} | " in done.stdout
    assert message in done.stdout


LEFTOVERS = {
    "a child": "import subprocess, sys\nsubprocess.Popen(['sleep', '987'])",
    "a child in its own session": "import subprocess\nsubprocess.Popen(['sleep', '987'], start_new_session=True)",
    "a child without our environment": "import subprocess\nsubprocess.Popen(['sleep', '987'], env={'PATH': '/bin'})",
    "a child of the shell": "import os\nos.system('setsid sleep 987 >/dev/null 2>&1 &')",
    "a fork": "import os, time\nif not os.fork():\n    os.setsid()\n    os.execlp('sleep', 'sleep', '987')",
    "a double fork": (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork():\n"
        "        os.execlp('sleep', 'sleep', '987')\n"
        "    os._exit(0)\n"
        "os.wait()"
    ),
}


@pytest.mark.parametrize("code", LEFTOVERS.values(), ids=LEFTOVERS)
def test_a_process_that_outlives_its_page_is_killed_and_named(docs, code) -> None:
    docs.add("lesson", code, languages=("en",))
    done = docs.run(
        "lesson", "--lang", "en", env={**os.environ, VARIABLE: "0.2"}
    )  # so it is waited for one second only
    assert done.returncode == 1, done.stdout
    assert "outlived the page and was killed: sleep 987" in done.stdout
    error = docs.records.read()[0]["error"]
    pid = int(error["message"].split("[pid ")[1].split("]")[0])
    assert not psutil.pid_exists(pid)
    if "shell" not in code and "unknown" not in error["message"]:
        assert error["line"] in range(6, 9), error


def test_a_process_that_ends_with_its_page_is_no_fault(docs) -> None:
    docs.add("lesson", "import subprocess\nsubprocess.Popen(['sleep', '0.3'])", languages=("en",))
    assert docs.run("lesson", "--lang", "en").returncode == 0


def test_the_rank_that_failed_first_is_named(docs) -> None:
    code = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("boom")
dist.barrier()
"""
    docs.add("lesson", code, TWO_RANKS)
    done = docs.run("lesson", "--lang", "en")
    assert done.returncode == 1
    assert "lesson.md:8: ValueError: boom   [rank 1 of 2, first failure]" in done.stdout
    assert "other ranks: rank 0: line 9: RuntimeError" in done.stdout


def run_until(docs, text: str, *limits: int) -> subprocess.CompletedProcess[str]:
    """Runs the page with growing limits: on a busy machine it may not get to its hang within the first."""
    for limit in limits:
        done = docs.run("lesson", "--lang", "en", "--timeout", str(limit))
        if text in done.stdout:
            return done
    pytest.fail(f"`{text}` was expected within {limits[-1]} s, and the report says: {done.stdout}")


def test_the_rank_that_hangs_is_named(docs) -> None:
    code = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(1000)
dist.barrier()
"""
    docs.add("lesson", code, TWO_RANKS)
    done = run_until(docs, "hung at line 9", 8, 30, 90)
    assert done.returncode == 1
    assert re.search(r"lesson.md:9: no end after \d+ s, killed: hung at line 9   .rank 1 of 2, first", done.stdout)
    assert "rank 0: at line 10 in barrier (distributed_c10d.py)" in done.stdout
    assert " gloo x2  " in done.stdout


def test_a_hang_ends_at_the_limit(docs) -> None:
    docs.add("lesson", "import time\ntime.sleep(1000)")
    done = run_until(docs, "hung at line 6", 2, 10, 30)
    assert "lesson.md:6: no end after " in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_harness_kills_the_page(docs, number) -> None:
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)"
    docs.add("lesson", code, languages=("en",))
    command = [sys.executable, str(ROOT / "docs_test.py"), *docs.arguments("lesson", "--lang", "en", "-v")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as harness:
        assert harness.stdout
        page = int(harness.stdout.readline())
        os.kill(harness.pid, number)
        _, errors = harness.communicate(timeout=scaled(120))
    assert harness.returncode == 130
    assert "interrupted" in errors
    assert not psutil.pid_exists(page)


def test_a_page_that_ignores_termination_is_killed(docs) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"
    docs.add("lesson", code, languages=("en",))
    done = run_until(docs, "hung at line 7", 1, 10, 30)
    assert done.returncode == 1
    assert "lesson.md:7: no end after " in done.stdout
