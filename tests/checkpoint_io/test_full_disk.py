"""A disk without room is an error that says so, on all ranks, and leaves the earlier checkpoint and nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from colossal.booster import Booster
from colossal.checkpoint_io import CheckpointIO

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from colossal.booster import Booster
from colossal.checkpoint_io import CheckpointIO
from colossal.errors import CheckpointError

folder, how = Path(sys.argv[1]), sys.argv[2]
io, booster = CheckpointIO(), Booster(device="cpu")
small, large = nn.Linear(500, 500), nn.Linear(1500, 1500)
options = {"file": {"use_safetensors": True}, "torch-file": {}, "sharded": {"shard": True, "use_safetensors": True},
           "torch-sharded": {"shard": True}, "async": {"use_safetensors": True, "use_async": True}}.get(how)

def save(model, number):
    if options is None:
        booster.save(folder / "run", model, step=number)
    else:
        io.save_model(model, folder / "model", **options)
    io.synchronize()

save(small, 1)
before = sorted(str(path) for path in folder.rglob("*"))
try:
    save(large, 2)
except CheckpointError as error:
    print(error)
assert sorted(str(path) for path in folder.rglob("*")) == before
fresh = nn.Linear(500, 500)
assert booster.load(folder / "run", fresh) == 1 if options is None else io.load_model(fresh, folder / "model")
assert torch.equal(fresh.weight, small.weight)
"""


def mount_works() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not mount_works(), reason="a small disk of its own needs the right to mount one")
@pytest.mark.parametrize("how", ["file", "torch-file", "sharded", "torch-sharded", "async", "steps"])
def test_a_full_disk_is_reported_and_nothing_is_lost(tmp_path: Path, how: str) -> None:
    script = f'mount -t tmpfs -o size=4m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}" {how}'
    command = ["unshare", "-m", "sh", "-c", script, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout
    assert "Check the free space" in done.stdout


def test_room_is_taken_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def refuse(_descriptor: int, _start: int, length: int) -> None:
        taken.append(length)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    monkeypatch.setattr("os.pwrite", lambda *_: pytest.fail("something was written"))
    with pytest.raises(RuntimeError, match="No space left on device"):
        CheckpointIO().save_model(nn.Linear(64, 64), tmp_path / "model", use_safetensors=True)
    assert taken[0] > 4 * 64 * 65
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_can_not_reserve_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    model = nn.Linear(64, 64)
    Booster(device="cpu").save_model(model, tmp_path / "model", use_safetensors=True)
    assert torch.equal(CheckpointIO().load_model(nn.Linear(64, 64), tmp_path / "model").weight, model.weight)
