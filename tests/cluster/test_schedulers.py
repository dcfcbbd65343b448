# pyright: reportArgumentType=false
"""Launching under Slurm and Open MPI, with what they really say; Open MPI itself is run where it is installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ports
import pytest
import torch
from ports import free_port
from torch import distributed as dist

import colossal
from colossal._src.cluster.schedulers import first_node, openmpi_host, openmpi_port, slurm_host, slurm_port
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.cluster import current_mesh
from colossal.errors import LaunchError
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

SOURCE = Path(colossal.__file__).parents[1]

# What `srun --nodes=2 --ntasks-per-node=2` sets, according to Slurm's manual. The two nodes are two addresses of this
# machine, so that the first one can really be found from the list.
NODES = 2
PER_NODE = 2


def srun_variables(rank: int, job: str) -> dict[str, str]:
    world, nodes = str(NODES * PER_NODE), str(NODES)
    node, local = divmod(rank, PER_NODE)
    shared = {
        "SLURM_JOB_ID": job,
        "SLURM_JOBID": job,
        "SLURM_STEP_ID": "3",
        "SLURM_STEPID": "3",
        "SLURM_JOB_NODELIST": "127.0.0.[1-9]",
        "SLURM_NODELIST": "127.0.0.[1-9]",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_STEP_NUM_TASKS": world,
        "SLURM_NTASKS": world,
        "SLURM_NPROCS": world,
        "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{NODES})",
        "SLURM_TASKS_PER_NODE": f"{PER_NODE}(x{NODES})",
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1",
    }
    own = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": ",".join(str(node * PER_NODE + task) for task in range(PER_NODE)),
        "SLURMD_NODENAME": f"127.0.0.{node + 1}",
    }
    return shared | own


def train() -> tuple[object, ...]:
    """A step of data parallelism; whoever is asked has the same parameters as one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)
    mesh = current_mesh()
    share = 8 // mesh.world_size
    own = slice(mesh.global_rank * share, (mesh.global_rank + 1) * share)
    booster = Booster(plugin=TorchDDPPlugin() if mesh.world_size > 1 else None)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, criterion, _, _ = booster.boost(model, sgd, torch.nn.MSELoss())
    booster.backward(criterion(boosted(inputs[own]), targets[own]), optimizer)
    optimizer.step()
    return mesh.global_rank, mesh.world_size, mesh.local_rank, model.weight.detach().flatten().tolist()


def train_alone() -> list[float]:
    colossal.launch_from_torch(verbose=False)
    return train()[3]  # type: ignore[return-value]


def train_under_srun() -> tuple[object, ...]:
    os.environ.update(srun_variables(int(os.environ["TEST_RANK"]), os.environ["TEST_JOB"]))
    colossal.launch_from_slurm(verbose=False, timeout_seconds=100)
    return train()


def test_tasks_on_several_nodes_of_slurm_meet_without_being_told_where() -> None:
    environment = {"TEST_RANK": "{rank}", "TEST_JOB": str(os.getpid())}
    ranks = run_processes(train_under_srun, 4, form=False, environment=environment)
    (alone,) = run_processes(train_alone, 1, form=False)
    assert [rank[:3] for rank in ranks] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
    for rank in ranks:
        torch.testing.assert_close(rank[3], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[003-007,9],gpu1", "node003"),
        ("node[9,003-007]", "node9"),
        ("rack[0-1]n[00-03]", "rack0n00"),
        ("tux[2-3].example.org,q", "tux2.example.org"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        (" node7 ", "node7"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(node_list, first) -> None:
    assert first_node(node_list) == first


def test_the_list_of_the_step_comes_before_that_of_the_job(monkeypatch) -> None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="Found no SLURM_STEP_NODELIST. Pass the host, or start with srun."):
        slurm_host()
    monkeypatch.setenv("SLURM_NODELIST", "old[1-2]")
    assert slurm_host() == "old1"
    monkeypatch.setenv("SLURM_JOB_NODELIST", "job[1-2]")
    assert slurm_host() == "job1"
    monkeypatch.setenv("SLURM_STEP_NODELIST", "step[1-2]")
    assert slurm_host() == "step1"
    monkeypatch.setenv("SLURM_STEP_NODELIST", ",")
    with pytest.raises(LaunchError, match="Found SLURM_STEP_NODELIST=','"):
        slurm_host()


def test_ports_differ_between_jobs_and_steps_and_not_between_ranks(monkeypatch) -> None:
    found = set()
    for job in range(20):
        for step in range(5):
            monkeypatch.setenv("SLURM_JOB_ID", str(job))
            monkeypatch.setenv("SLURM_STEP_ID", str(step))
            monkeypatch.setenv("PMIX_NAMESPACE", f"{job}.{step}")
            monkeypatch.setenv("SLURM_PROCID", str(job))
            found |= {slurm_port(), openmpi_port()}
    assert len(found) > 150
    assert all(20000 <= port < 30000 for port in found)


def test_open_mpi_on_several_hosts_needs_the_host(monkeypatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert openmpi_host() == "localhost"
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    with pytest.raises(LaunchError, match="Found 2 of 4 processes on this one. Pass the host"):
        openmpi_host()
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "0")
    with pytest.raises(LaunchError, match="the first one of the hostfile"):
        colossal.launch_from_openmpi()
    assert not dist.is_initialized()


# ------------------------------------------------------------------------------------------ mpirun itself

PROGRAM = """
import json, pathlib, sys
import colossal
from test_schedulers import train
words = sys.argv[2:]
meeting = {"host": words[0], "port": int(words[1])} if words else {}
mesh = colossal.launch_from_openmpi(verbose=False, timeout_seconds=100, **meeting)
pathlib.Path(sys.argv[1], str(mesh.global_rank)).write_text(json.dumps(train()))
"""


def mpirun(count: int, *words: str) -> list[str]:
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("mpirun is not installed (Debian's package openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *root, "--oversubscribe", "--bind-to", "none", "-np", str(count), *words]


@pytest.mark.parametrize(("count", "told"), [(2, True), (4, False)])
def test_processes_of_mpirun_train_like_one(count, told, tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    paths = os.pathsep.join([str(SOURCE), *(str(Path(file).parent) for file in (__file__, ports.__file__))])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLOSSAL_DEVICE": "cpu"}
    meeting = ["127.0.0.1", str(free_port())] if told else []
    command = mpirun(count, sys.executable, str(tmp_path / "program.py"), str(tmp_path), *meeting)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (alone,) = run_processes(train_alone, 1, form=False)
    for rank in range(count):
        place = json.loads((tmp_path / str(rank)).read_text(encoding="utf-8"))
        assert place[:3] == [rank, count, rank]
        torch.testing.assert_close(place[3], alone, rtol=1e-6, atol=1e-7)


def test_a_process_that_fails_ends_the_job_of_mpirun(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import colossal, os, sys\nimport torch.distributed as dist\n"
        "mesh = colossal.launch_from_openmpi(verbose=False, timeout_seconds=100)\n"
        "if mesh.global_rank == 1:\n    os._exit(9)\n"
        "dist.barrier()\n",
        encoding="utf-8",
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLOSSAL_DEVICE": "cpu"}
    command = mpirun(2, sys.executable, str(program))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
