# pyright: reportAttributeAccessIssue=false
"""See [Note: workers that outlive the interpreter] in cluster/teardown.py."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import colossal
from colossal._src.cluster import teardown as leaving
from colossal._src.cluster.mesh import _AMBIENT
from colossal.testing import fake_world, run_processes

pytestmark = pytest.mark.slow

PROGRAM = """
import torch, torch.distributed as dist
import colossal
colossal.launch_from_torch(verbose=False)
for _ in range(50):
    dist.all_reduce(torch.ones(10), async_op=True)
"""


def leave_twice() -> tuple[bool, bool, int]:
    kept = colossal.cluster.current_mesh()
    dist.all_reduce(torch.ones(10))
    leaving.leave()
    leaving.leave()
    assert kept.world_size == 2
    return dist.is_initialized(), _AMBIENT.get() is not None, len(leaving._wake_ups())


def test_leaving_dissolves_the_world() -> None:
    for initialized, ambient, workers in run_processes(leave_twice, 2, environment={"COLOSSAL_BACKEND": "gloo"}):
        assert not initialized
        assert not ambient
        assert workers


def status(state: str, switches: int) -> str:
    lines = ("Name:\tpt_gloo_runloop", f"State:\t{state}", f"voluntary_ctxt_switches:\t{switches}")
    return "\n".join([*lines, "nonvoluntary_ctxt_switches:\t7"])


def test_a_thread_is_at_rest_when_it_slept_all_the_while() -> None:
    asleep = leaving._sleeps(status("S (sleeping)", 4))
    assert asleep == leaving._sleeps(status("S (sleeping)", 4))
    assert asleep != leaving._sleeps(status("S (sleeping)", 5)), "it woke up in between"
    assert leaving._sleeps(status("R (running)", 4)) != leaving._sleeps(status("R (running)", 4))


def want_the_interpreter() -> tuple[bool, bool]:
    """A thread that waits for the interpreter, which we hold, sleeps most of the time and yet is not at rest."""
    stop, started = threading.Event(), threading.Event()

    def want() -> None:
        started.set()
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=want)
    thread.start()
    started.wait()
    task = Path("/proc/self/task", str(thread.native_id), "status")
    before = leaving._sleeps(leaving._read(task))
    busy, end = False, time.monotonic() + 20
    while not busy and time.monotonic() < end:
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            pass
        busy = before != leaving._sleeps(leaving._read(task))
    stop.set()
    thread.join()
    deadline = time.monotonic() + 10
    while leaving._read(task) and time.monotonic() < deadline:  # the kernel forgets a thread a little after its end
        time.sleep(0.01)
    return busy, leaving._read(task) == ""


def test_a_thread_that_wants_the_interpreter_is_not_at_rest() -> None:
    assert run_processes(want_the_interpreter, 1, fresh=True) == [(True, True)]


def test_threads_that_stay_busy_are_not_waited_for_forever(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(leaving, "DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(leaving, "_wake_ups", lambda: asked.append(1) or object())
    with fake_world(2):
        colossal.cluster.current_mesh()
        leaving.leave()
        assert asked
        dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())


@pytest.mark.parametrize("processes", [1, 4])
def test_a_program_ends_well_though_collectives_are_in_flight(processes, tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "program.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
