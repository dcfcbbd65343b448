"""A process that is killed at any moment leaves a checkpoint that is whole."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed.py")
KINDS = ["file", "torch-file", "sharded", "changing-format", "optimizer", "steps", "async-sharded", "async-steps"]


def kill(kind: str, how: str, number: int, folder: Path) -> str:
    command = [sys.executable, str(PROGRAM), kind, how, str(number), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["sharded", "steps", "async-steps"])
def test_killed_at_a_hundred_random_times(kind: str, tmp_path: Path) -> None:
    assert kill(kind, "random", 100, tmp_path) == f"{kind}: 100 kills, 0 lost checkpoints\n"


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_everything_that_is_done_to_the_file_system(kind: str, tmp_path: Path) -> None:
    kills = int(kill(kind, "events", 1, tmp_path).split()[1])
    assert kills >= 8
