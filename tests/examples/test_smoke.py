"""Every example program trains: its loss falls, whichever plugin divides it."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

from colossal.testing import run_processes

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "gpt": ("--tp-size", "2"),
    "vit": ("--pp-size", "2"),
    "bert": ("--plugin", "zero"),
    "llama": ("--plugin", "gemini"),
    "opt": ("--plugin", "ddp"),
}


def run_program(name: str, words: list[str]) -> None:
    """What a launcher's process does; `run_processes` has imported torch already."""
    sys.path.insert(0, str(ROOT))
    sys.argv[1:] = words
    runpy.run_module(f"examples.{name}.train", run_name="__main__", alter_sys=True)


def run_by_torchrun(name: str, words: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [*launcher, "-m", f"examples.{name}.train", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_trains_on_two_ranks(name, tmp_path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    words = ["--smoke", "--metrics", str(metrics), *PROGRAMS[name]]
    if name == "gpt":  # one by the command that all READMEs show
        run_by_torchrun(name, words)
    else:
        place = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(free_port())
        run_processes(run_program, 2, name, words, form=False, environment=place, timeout_seconds=300)
    *lines, last = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 24
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), losses
    assert last["test_loss"] < losses[0]
    assert all(line["samples_per_second"] > 0 for line in lines)


def test_every_program_is_run_here() -> None:
    assert {path.parent.name for path in (ROOT / "examples").glob("*/train.py")} == set(PROGRAMS)
