import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from colossal._src.cli.ranks import REPORT_VARIABLE, follow_parent, run_ranks

pytestmark = pytest.mark.slow

HEAD = """
import os, sys, time
from colossal._src.cli.ranks import follow_parent, say
follow_parent()
rank = int(os.environ["RANK"])
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> Callable[[str], str]:
    """Writes the program of the ranks as a module, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def write(body: str) -> str:
        (tmp_path / "a_rank.py").write_text(HEAD + body, encoding="utf-8")
        return "a_rank"

    return write


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def test_every_rank_reports_and_ends(module) -> None:
    name = module(
        "say(rank=rank, words=sys.argv[1:], extra=os.environ['EXTRA'])\nsay(second=True)\nprint('done', rank)"
    )
    first, second = run_ranks(name, 2, ["a", "b"], timeout_seconds=120, environment={"EXTRA": "x"})
    assert (first.rank, first.code, first.printed) == (0, 0, "done 0")
    assert first.reports == [{"rank": 0, "words": ["a", "b"], "extra": "x"}, {"second": True}]
    assert second.reports[0]["rank"] == 1


def test_the_ranks_form_a_world(module) -> None:
    name = module(
        "import colossal\nmesh = colossal.launch_from_torch(verbose=False)\n"
        "say(world=mesh.world_size, rank=mesh.global_rank, local=mesh.local_rank)"
    )
    outcomes = run_ranks(name, 2, timeout_seconds=120)
    assert [one.reports for one in outcomes] == [[{"world": 2, "rank": rank, "local": rank}] for rank in range(2)]


def test_a_rank_that_hangs_is_ended_and_says_where_it_was(module) -> None:
    name = module("def stuck():\n    time.sleep(600)\nif rank == 1:\n    say(pid=os.getpid())\n    stuck()")
    first, second = run_ranks(name, 2, timeout_seconds=8)
    assert first.code == 0
    assert second.code is None
    assert "in stuck" in second.printed
    assert not alive(second.reports[0]["pid"])


def test_after_a_failure_the_others_are_ended_soon(module) -> None:
    name = module("if rank == 1:\n    sys.exit('broken')\ntime.sleep(600)")
    started = time.monotonic()
    first, second = run_ranks(name, 2, timeout_seconds=120)
    assert time.monotonic() - started < 100
    assert (first.code, second.code, second.printed) == (None, 1, "broken")


def test_what_a_rank_has_started_ends_with_it(module) -> None:
    name = module("import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nsay(pid=child.pid)")
    (only,) = run_ranks(name, 1, timeout_seconds=120)
    assert only.code == 0
    deadline = time.monotonic() + 10
    while alive(only.reports[0]["pid"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(only.reports[0]["pid"])


def test_a_rank_that_is_killed_has_a_negative_code(module) -> None:
    (only,) = run_ranks(module("os.kill(os.getpid(), 9)"), 1, timeout_seconds=120)
    assert only.code == -9


def test_a_rank_ends_when_its_parent_is_gone(module, tmp_path) -> None:
    module("import pathlib\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)")
    parent = "from colossal._src.cli.ranks import run_ranks\nrun_ranks('a_rank', 1, timeout_seconds=1200)"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    pid_file = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    assert alive(pid)
    process.kill()
    process.wait()
    while alive(pid) and time.monotonic() < deadline + 60:
        time.sleep(0.05)
    assert not alive(pid)


def test_under_another_launcher_a_rank_minds_its_own_business(monkeypatch) -> None:
    monkeypatch.delenv(REPORT_VARIABLE, raising=False)
    follow_parent()  # would start a thread, which the hygiene of the tests would find
