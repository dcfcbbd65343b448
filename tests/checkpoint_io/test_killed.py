"""A process that is killed at any moment leaves a checkpoint that is whole."""

import subprocess
import sys
from pathlib import Path

import pytest
from chosen import ALL, chosen

from colossal._src.testing.limits import scaled

PROGRAM = Path(__file__).with_name("killed.py")
KINDS = ["file", "torch-file", "sharded", "changing-format", "optimizer", "steps", "async-sharded", "async-steps"]
STRIDE = 4


def kill(kind: str, how: str, number: str, folder: Path) -> str:
    command = [sys.executable, str(PROGRAM), kind, how, number, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(600), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", ["sharded", "steps", "async-steps"])
def test_killed_at_random_times(kind: str, tmp_path: Path) -> None:
    kills = 100 if ALL else 20
    assert kill(kind, "random", str(kills), tmp_path) == f"{kind}: {kills} kills, 0 lost checkpoints\n"


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_what_is_done_to_the_file_system(kind: str, tmp_path: Path) -> None:
    """At everything, or at every fourth thing from one of the first four on."""
    (first,) = (1,) if ALL else chosen(range(1, STRIDE + 1), 1, kind)
    kills = int(kill(kind, "events", f"{first}:{1 if ALL else STRIDE}", tmp_path).split()[1])
    assert kills >= (8 if ALL else 8 // STRIDE)
