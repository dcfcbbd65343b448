"""The page "Train on several nodes": its program between machines, its batch script, manifest and commands run here."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from recorded_texts import has_recorded_texts

from colossal.testing import make_finetuning_inputs
from pagetest.model.reader import read_page

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = read_page(ROOT / "docs/source/en/tutorials/several_nodes.md", "en", "tutorials/several_nodes")
SHOWN = [block.source for block in PAGE.blocks if block.language == "shell" and not block.role]
TORCHRUN, BATCH = (next(text for text in SHOWN if text.startswith(start)) for start in ("export TORCH", "#!/bin/bash"))
ARGUMENTS = "/shared/checkpoints 1000"

STAND_IN = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import colossal

mesh = colossal.launch_from_torch(verbose=False, timeout_seconds=30)
total = torch.ones(())
dist.all_reduce(total)
Path("started").touch()
if Path("wait").exists():
    time.sleep(300)
if Path("lose").exists() and os.uname().nodename == "node2":
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
line = f"rank {mesh.global_rank} of {mesh.world_size}: {total.item():.0f} {sys.argv[1:]} {restarted}"
os.write(1, (line + "\\n").encode())
"""

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done  # its own options
shift  # torchrun
torchrun --local-addr=localhost "$@" & other=$!
torchrun --local-addr=localhost "$@" && wait $other
"""

SCONTROL = """#!/bin/bash
if [ "$*" = "show hostnames node[1-2]" ]; then printf 'localhost\\n127.0.0.1\\n'; else echo "$*" >> requeued; fi
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a job: what plays train.py, and what plays SLURM."""
    (tmp_path / "train.py").write_text(STAND_IN)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text('export PATH="$PWD:$PATH"\n')
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clean | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLOSSAL_DEVICE": "cpu"} | more


def on_one_machine(command: str, port: int, endpoint: str = "") -> str:
    """Two small nodes here instead of two large ones, and a port of this test instead of the usual one."""
    for old, new in (("--nproc_per_node=8", "--nproc_per_node=2"), ("29500", str(port)), (endpoint, "localhost")):
        assert not old or old in command
        command = command.replace(old, new) if old else command
    return command


def run(command: str, folder: Path, **more: str) -> list[str]:
    words, settings = ["bash", "-e", "-c", command], environment(**more)
    done = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


def expected(world_size: int, arguments: str = ARGUMENTS, *, restarted: bool = False) -> list[str]:
    return [
        f"rank {rank} of {world_size}: {world_size**2} {arguments.split()} {restarted}" for rank in range(world_size)
    ]


@pytest.mark.parametrize("text", SHOWN)
def test_what_is_shown_is_a_program_of_the_shell(text) -> None:
    assert subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False).stderr == b""


def test_the_batch_script_starts_the_program_on_all_nodes(folder, free_port) -> None:
    variables = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    assert run(on_one_machine(BATCH, free_port), folder, **variables) == expected(4)
    assert not (folder / "requeued").exists()


def test_the_batch_script_requeues_its_job_before_the_time_is_over(folder, free_port) -> None:
    (folder / "wait").touch()
    variables = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            ["bash", "-c", on_one_machine(BATCH, free_port)],
            cwd=folder,
            env=environment(**variables),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 100
        while not (folder / "started").exists():
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        job.wait(20)
        assert (folder / "requeued").read_text() == "requeue 42\n"
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        _wait_until_gone(job.pid)


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)


def test_what_slurm_reads_names_one_launcher_per_node() -> None:
    lines = [line.partition(" --")[2].split("#")[0].strip() for line in BATCH.splitlines() if "#SBATCH" in line]
    options = {name: value for name, _, value in (line.partition("=") for line in lines)}
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "8"
    assert {"requeue", "open-mode", "signal", "nodes", "time"} <= options.keys()


def test_the_manifest_agrees_with_itself_and_its_command_starts_the_program(folder, free_port) -> None:
    (text,) = [block.source for block in PAGE.blocks if block.language == "yaml"]
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = [*container["command"], *container["args"]]
    assert all(isinstance(word, str) for word in command)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    assert f"--nnodes={spec['completions']}" in command
    assert f"--nproc_per_node={container['resources']['limits']['nvidia.com/gpu']}" in command
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    started = on_one_machine(shlex.join(command), free_port, f"{name}-0.{pod['subdomain']}")
    both = started.replace("torchrun", "torchrun --local-addr=localhost")
    arguments = " ".join(command[command.index("train.py") + 1 :])
    assert run(f"{both} & {both}; wait", folder) == expected(4, arguments)


def test_a_node_that_is_lost_is_replaced(cluster, folder) -> None:
    (folder / "lose").touch()
    export, _, command = TORCHRUN.replace("\\\n", "").partition("\n")
    name, _, value = export.removeprefix("export ").partition("=")
    settings = {name: value}
    words = ["-m", "torch.distributed.run", *shlex.split(command.replace("per_node=8", "per_node=1"))[1:]]
    nodes = {name: cluster.spawn(*words, folder=folder, at=name, env=settings) for name in ("node1", "node2")}
    try:
        nodes["node2"].wait(100)
        assert nodes["node2"].returncode == -signal.SIGKILL
        nodes["node3"] = cluster.spawn(*words, folder=folder, at="node3", env=settings)
        outputs = [nodes[name].communicate(timeout=120) for name in ("node1", "node3")]
    finally:
        for process in nodes.values():
            process.kill()
            process.communicate()
    lines = sorted(line for output, _ in outputs for line in output.splitlines() if line.startswith("rank"))
    assert lines in (expected(2, restarted=True), _one_restarted()), outputs


def _one_restarted() -> list[str]:
    """The node that is new has not restarted anything itself."""
    return [expected(2, restarted=restarted)[rank] for rank, restarted in enumerate((True, False))]


def test_the_program_trains_between_machines_as_the_page_says(cluster, tmp_path) -> None:
    make_finetuning_inputs(tmp_path / "inputs")
    (source,) = [block.source for block in PAGE.blocks if block.file == "train.py"]
    (tmp_path / "train.py").write_text(source)
    one_node = next(block.source for block in PAGE.blocks if block.is_output).splitlines()
    if not has_recorded_texts(tmp_path / "inputs"):  # those of another Python, whose losses are others
        alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
        settings = environment(OMP_NUM_THREADS="1")
        done = subprocess.run([*alone, "one_node", "10"], cwd=tmp_path, env=settings, capture_output=True, check=True)
        one_node = done.stdout.decode().splitlines()
    words = ["--host", "node1,node2", "--nproc_per_node", "2", "train.py", "checkpoints", "10"]
    code, output, errors = cluster.run(*words, folder=tmp_path)
    assert code == 0, errors
    assert output.splitlines() == [f"node1 | {line}" for line in one_node[:3]]
