"""The self test of `colossal check`, healthy and broken in each of its steps."""

import os
import sys
from collections.abc import Callable

import pytest
from chosen import chosen

from colossal._src.cli.check.rank import STEPS
from colossal._src.cli.check.report import Row
from colossal._src.cli.check.selftest import SelfTest, self_tests

pytestmark = pytest.mark.slow

BROKEN = """
import os, sys, time
import colossal._src.cli.check.rank as program
steps = dict(program.STEPS)
before = steps[{step!r}]
def broken(folder):
    if os.environ["RANK"] in {ranks!r}:
        {body}
    before(folder)
steps[{step!r}] = broken
program.STEPS = steps
sys.exit(program.main())
"""


@pytest.fixture
def broken(tmp_path, monkeypatch) -> Callable[..., dict[str, Row]]:
    """The rows of a self test in whose step rank 1, or others, first run a line."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def run(step: str, body: str, timeout_seconds: float = 120, ranks: str = "1") -> dict[str, Row]:
        (tmp_path / "broken_rank.py").write_text(BROKEN.format(step=step, body=body, ranks=ranks), encoding="utf-8")
        return {row.name: row for row in SelfTest("cpu", 2, timeout_seconds, "broken_rank").rows()}

    return run


def test_a_healthy_machine_passes_every_step() -> None:
    rows = list(SelfTest("cpu", 2, 120).rows())
    assert [(row.name, row.status) for row in rows] == [(name, "ok") for name in STEPS]
    assert all(row.section == "self test, 2 ranks, cpu" and row.value >= 0 for row in rows)


@pytest.mark.chosen
@pytest.mark.parametrize("step", chosen(list(STEPS), 2, "steps of the self test"))
def test_a_step_that_fails_is_a_problem_and_the_rest_is_skipped(step, broken) -> None:
    rows = broken(step, "raise ValueError('no such luck')")
    names = list(STEPS)
    at = names.index(step)
    assert [rows[name].status for name in names] == ["ok"] * at + ["problem"] + ["skipped"] * (3 - at)
    assert rows[step].found == "rank 1: ValueError: no such luck"
    assert rows[step].advice


def test_a_rank_that_computes_something_else_is_found(broken) -> None:
    body = "program._SEED += 1"
    rows = broken("training step", body)
    assert rows["training step"].status == "problem"
    assert "differs from a single process" in rows["training step"].found


def test_a_wrong_sum_is_found(broken) -> None:
    body = "from colossal._src import comm; reduce = comm.reduce; comm.reduce = lambda t, axis: reduce(t, axis) + 1"
    rows = broken("collective", body)
    assert rows["collective"].status == "problem"
    assert "the sum of the ranks' numbers is 4.0" in rows["collective"].found


def test_a_rank_that_hangs_is_a_problem_that_says_where(broken) -> None:
    rows = broken("collective", "time.sleep(600)", timeout_seconds=20)
    assert rows["launch"].status == "ok"
    assert rows["collective"].status == "problem"
    assert "did not come to an end in 20 s; it was at File" in rows["collective"].found
    assert rows["checkpoint"].status == "skipped"


def test_a_rank_that_its_watchdog_aborts_has_lost_a_peer(broken) -> None:
    words = "[rank1]:[E1016 03:31:38 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout"
    rows = broken("collective", f"print({words!r}, file=sys.stderr, flush=True); os.abort()")
    assert "rank 1 lost a peer, or waited for one too long" in rows["collective"].found


def test_a_rank_that_is_killed_is_a_problem(broken) -> None:
    rows = broken("training step", "os.kill(os.getpid(), 9)")
    assert rows["training step"].status == "problem"
    assert "rank 1 was killed by signal 9" in rows["training step"].found


def test_a_rank_that_dies_after_the_last_step_is_a_problem(broken) -> None:
    rows = broken("checkpoint", "import atexit; atexit.register(os._exit, 7)")
    assert [rows[name].status for name in STEPS] == ["ok"] * 4
    assert rows["end"].status == "problem"
    assert "rank 1 ended with code 7" in rows["end"].found


def test_a_rank_that_waits_for_a_dead_one_is_not_the_problem(broken) -> None:
    ends = "import atexit; atexit.register(*((time.sleep, 600), (os._exit, 7))[int(os.environ['RANK'])])"
    rows = broken("checkpoint", ends, ranks="01")
    assert [rows[name].status for name in STEPS] == ["ok"] * 4
    assert "rank 1 ended with code 7" in rows["end"].found


def test_the_cpu_is_tested_in_any_case() -> None:
    tests = list(self_tests(5))
    assert [(test.device, test.size, test.timeout_seconds) for test in tests] == [("cpu", 2, 5)]
