"""A program that ends while its last asynchronous save is being written, ends when the checkpoint is complete."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import free_port
from torch import nn

from colossal._src.checkpoint_io import CheckpointManager
from colossal.checkpoint_io import CheckpointIO

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("ending.py")
CASES = {"none,exit": 1, "ddp,dissolve": 2, "fsdp,last line": 2}
"""A plugin and how the program ends, with the number of ranks; one that dissolves the world makes a save that fails."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ending")
    command = [sys.executable, str(PROGRAM), str(folder), *(f"{case},{free_port()}" for case in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))


@pytest.mark.parametrize("case", CASES)
def test_it_waits_for_the_checkpoint(case: str, folder: Path) -> None:
    codes: dict[str, list[int]] = json.loads((folder / "codes.json").read_text())
    (full_name,) = (each for each in codes if each.startswith(case))
    outputs = [path.read_text() for path in sorted((folder / full_name).glob("*.out"))]
    assert len(outputs) == CASES[case]
    assert all(output.startswith("complete: False\n") for output in outputs), outputs
    if "dissolve" in case:
        assert codes[full_name] == [1, 1], outputs
        assert all("CheckpointError: Saving a checkpoint needs the directory" in output for output in outputs)
    else:
        assert codes[full_name] == [0] * CASES[case], outputs
    for load in (
        lambda model: CheckpointIO().load_model(model, folder / full_name / "model"),
        lambda model: CheckpointManager(folder / full_name / "steps", CheckpointIO()).load(model, None, None) == 5,
    ):
        fresh = net(4)
        assert load(fresh)
        for name, value in net(3).state_dict().items():
            assert torch.equal(fresh.state_dict()[name], value), name
