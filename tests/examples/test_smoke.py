"""Every example program trains: its loss falls, whichever plugin divides it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "gpt": ("--tp-size", "2"),
    "vit": ("--pp-size", "2"),
    "bert": ("--plugin", "zero"),
    "llama": ("--plugin", "gemini"),
    "opt": ("--plugin", "ddp"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_trains_on_two_ranks(name, tmp_path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, "-m", f"examples.{name}.train", "--smoke", "--metrics", str(metrics), *PROGRAMS[name]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 24
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), losses
    assert last["test_loss"] < losses[0]
    assert all(line["samples_per_second"] > 0 for line in lines)


def test_every_program_is_run_here() -> None:
    assert {path.parent.name for path in (ROOT / "examples").glob("*/train.py")} == set(PROGRAMS)
