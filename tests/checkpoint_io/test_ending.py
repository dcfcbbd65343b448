"""A program that ends while its last asynchronous save is being written, ends when the checkpoint is complete."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from colossal.checkpoint_io import CheckpointIO, Steps

PROGRAM = """
import sys, time
from pathlib import Path

import torch

import colossal
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossal.checkpoint_io import save

plugin, ending, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
write = save.SafeSave._write_blocks


def slowly(self, paths):
    time.sleep(0.7)
    return write(self, paths)


save.SafeSave._write_blocks = slowly
if plugin != "none":
    colossal.launch_from_torch(verbose=False)
torch.manual_seed(3)
net = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(4)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
booster = Booster(device="cpu", plugin={"none": lambda: None, "ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}[plugin]())
model, optimizer, *_ = booster.boost(net, optimizer)
booster.save(folder / "steps", model, optimizer, step=5, use_async=True)
booster.save_model(model, folder / "model", shard=True, use_safetensors=True, size_per_shard=2, use_async=True)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
print("complete at the end:", (folder / "model" / "model.safetensors.index.json").exists(), flush=True)
if ending == "dissolve":
    torch.distributed.destroy_process_group()
if ending == "exit":
    sys.exit(0)
"""


def run(folder: Path, plugin: str, ending: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    launcher = [] if plugin == "none" else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launcher, str(program), plugin, ending, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("plugin", "ending"), [("none", "last line"), ("ddp", "exit"), ("ddp", "dissolve"), ("fsdp", "last line")]
)
def test_it_waits_for_the_checkpoint(plugin: str, ending: str, tmp_path: Path) -> None:
    done = run(tmp_path, plugin, ending)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["complete at the end: False"] * (1 if plugin == "none" else 2)
    torch.manual_seed(3)
    expected = nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))
    for load in (
        lambda model: CheckpointIO().load_model(model, tmp_path / "model"),
        lambda model: Steps(tmp_path / "steps", CheckpointIO()).load(model, None, None) == 5,
    ):
        fresh = nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))
        assert load(fresh)
        for name, value in expected.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], value), name


def test_an_error_after_the_world_is_dissolved_is_told(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file where a directory is to be")
    done = run(tmp_path, "ddp", "dissolve")
    assert done.returncode == 1
    assert "CheckpointError: Saving with shard=True needs the path of a directory" in done.stderr
