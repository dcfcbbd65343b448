"""See [Note: workers that outlive the interpreter] in cluster/leave.py."""

import os
import subprocess
import sys

import pytest
import torch
from torch import distributed as dist

import colossal
from colossal.cluster import leave as leaving
from colossal.cluster.mesh import _AMBIENT
from colossal.testing import fake_world, run_processes

PROGRAM = """
import torch, torch.distributed as dist
import colossal
colossal.launch_from_torch(verbose=False)
for _ in range(50):
    dist.all_reduce(torch.ones(10), async_op=True)
"""


def leave_twice() -> tuple[bool, bool, int]:
    colossal.cluster.current_mesh()
    dist.all_reduce(torch.ones(10))
    leaving.leave()
    leaving.leave()
    return dist.is_initialized(), _AMBIENT.get() is not None, leaving._busy_workers()


def test_leaving_dissolves_the_world_and_its_threads_are_asleep() -> None:
    assert run_processes(leave_twice, 2) == [(False, False, 0)] * 2


def test_threads_that_stay_busy_are_not_waited_for_forever(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(leaving, "DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(leaving, "_busy_workers", lambda: asked.append(1) or 1)
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
