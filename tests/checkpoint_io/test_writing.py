"""Files appear whole or not at all, and all ranks agree on what happened."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal.checkpoint_io import CheckpointIndexFile, CheckpointIO, ProcessGroupIO
from colossal.errors import CheckpointError, ConfigError, UnsupportedError
from colossal.testing import run_processes, run_threads


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fail_at(save: Callable[..., None], call: int) -> Callable[..., None]:
    """Return `save` that writes half a file and fails at its n-th call."""
    calls: list[object] = []

    def failing(content: Any, file: IO[bytes]) -> None:
        calls.append(file)
        if len(calls) == call:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(content, file)

    return failing


@pytest.mark.parametrize("shard", [False, True])
def test_a_failed_save_leaves_the_earlier_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: bool
) -> None:
    path = tmp_path if shard else tmp_path / "model.pt"
    saved = nn.Linear(8, 8)
    save = {"shard": shard, "size_per_shard": 1 / 2**13}
    CheckpointIO().save_model(saved, path, **save)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_at(torch.save, 2 if shard else 1))
        with pytest.raises(CheckpointError, match=r"No space left on device.*Check the free space"):
            CheckpointIO().save_model(nn.Linear(8, 8), path, **save)
    assert contents(tmp_path) == before
    assert torch.equal(CheckpointIO().load_model(nn.Linear(8, 8), path).weight, saved.weight)


def test_an_interrupted_save_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_content: Any, file: IO[bytes]) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        CheckpointIO().save_model(nn.Linear(2, 2), tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("same_names", [False, True])
def test_a_move_that_stops_halfway_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_names: bool
) -> None:
    saved, fresh, sizes = nn.Linear(8, 8), nn.Linear(8, 8), [1 / 2**13, 1 / 2**13 if same_names else 1]
    CheckpointIO().save_model(saved, tmp_path, shard=True, size_per_shard=sizes[0])
    replace, moved = Path.replace, []

    def stop(self: Path, target: Path) -> Path:
        moved.append(target)
        if len(moved) == 2:
            raise OSError("the machine went down")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(CheckpointError, match="into place"):
            CheckpointIO().save_model(nn.Linear(8, 8), tmp_path, shard=True, size_per_shard=sizes[1])
    assert not list(tmp_path.glob(".*"))
    assert torch.equal(CheckpointIO().load_model(fresh, tmp_path).weight, saved.weight)


def _what_a_rank_sees(folder: str) -> list[str]:
    """Save, load and fail on both ranks; return what each rank saw."""
    io, seen = CheckpointIO(ProcessGroupIO()), []
    model = nn.Linear(2, 2)
    io.save_model(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), Path(folder, "ddp.pt"))
    io.load_model(nn.parallel.DistributedDataParallel(model), Path(folder, "ddp.pt"))
    nn.init.constant_(model.weight, dist.get_rank())
    io.save_model(model, Path(folder, "model.pt"))
    seen.append(str(Path(folder, "model.pt").exists()))
    seen.append(str(io.load_model(model, Path(folder, "model.pt")).weight.sum().item()))
    whole = Path(folder, "model.pt").read_bytes()
    Path(folder, f"lost-{dist.get_rank()}.pt").write_bytes(whole if dist.get_rank() == 0 else whole[:-1])
    for action in (
        lambda: io.save_model(model, folder),
        lambda: io.save_lr_scheduler(None, Path(folder, "schedule")),  # type: ignore[arg-type]
        lambda: io.load_model(model, Path(folder, f"lost-{dist.get_rank()}.pt")),
        lambda: io.load_model(model, Path(folder, "missing.pt")),
    ):
        with pytest.raises(CheckpointError) as caught:
            action()
        seen.append(str(caught.value))
    return seen


def test_ranks_agree_on_success_and_failure(tmp_path: Path) -> None:
    first, second = run_processes(_what_a_rank_sees, 2, str(tmp_path))
    assert first == second
    assert first[:2] == ["True", "0.0"]
    for text, expected in zip(
        first[2:], ["pass shard=True", "AttributeError", "lost-1.pt", "Found nothing at"], strict=True
    ):
        assert expected in text
    assert [text[-8:] for text in first[2:]] == ["rank 0.)", "rank 0.)", "rank 1.)", "rank 0.)"]


def test_every_rank_raises_the_first_ranks_error() -> None:
    def fail() -> str:
        def job() -> None:
            if dist.get_rank() > 0:
                raise UnsupportedError(f"{dist.get_rank()} cannot.")

        with pytest.raises(UnsupportedError) as caught:
            ProcessGroupIO().read(job)
        return str(caught.value)

    assert set(run_threads(fail, 3)) == {"1 cannot. (This happened on rank 1.)"}


def test_a_shared_checkpoint_needs_a_world() -> None:
    with pytest.raises(ConfigError, match="GeneralCheckpointIO"):
        ProcessGroupIO()


def test_the_index_file_stands_on_its_own(tmp_path: Path) -> None:
    index = CheckpointIndexFile(tmp_path)
    index.append_weight_map(0, "b.bin")
    index.append_weight_map("weight", "a.bin")
    index.append_weight_map("bias", "a.bin")
    index.append_meta_data("total_size", 8)
    index.export(tmp_path / "new" / "index.json")
    index.write_index_file("index.json")
    again = CheckpointIndexFile.from_file(str(tmp_path / "index.json"))
    assert again.get_checkpoint_filenames() == [str(tmp_path / "a.bin"), str(tmp_path / "b.bin")]
    assert again.get_checkpoint_file("weight") == str(tmp_path / "a.bin")
    assert again.get_all_param_names() == ["0", "weight", "bias"]
    assert again.get_param_group_filename() is None
    with pytest.raises(CheckpointError, match="no 'other' among 3 names"):
        again.get_checkpoint_file("other")


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_a_checkpoint_can_be_read_by_whoever_may_read_other_files(use_safetensors, tmp_path) -> None:
    (tmp_path / "other").touch()
    CheckpointIO().save_model(nn.Linear(1, 1), tmp_path / "model", use_safetensors=use_safetensors)
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_two_processes_that_save_to_one_path_leave_a_whole_file(tmp_path: Path) -> None:
    """Each trains alone, without a plugin; neither deletes what the other is writing."""
    target = tmp_path / "model.safetensors"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    running, dead = (target.with_name(f".{target.name}.{number}.tmp") for number in (other.pid, 2**22 + 1))
    odd = target.with_name(f".{target.name}.left.tmp")
    for file in (running, dead, odd):
        file.touch()
    CheckpointIO().save_model(nn.Linear(1, 1), target, use_safetensors=True)
    assert sorted(tmp_path.iterdir()) == [running, target]
    other.communicate(b"\n")
    CheckpointIO().save_model(nn.Linear(1, 1), target, use_safetensors=True)
    assert list(tmp_path.iterdir()) == [target]


def _save_often(folder: str) -> None:
    target = Path(folder, "model.safetensors")
    model = nn.Linear(64, 64)
    for _ in range(20):
        CheckpointIO().save_model(model, target, use_safetensors=True)
        CheckpointIO().load_model(nn.Linear(64, 64), target)


def test_ranks_without_a_plugin_may_save_to_one_path(tmp_path: Path) -> None:
    run_processes(_save_often, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def _count_exchanges(folder: str) -> dict[str, int]:
    """Count the collectives of each verb."""
    exchange, calls = dist.all_gather_object, []
    dist.all_gather_object = lambda *args, **kwargs: (calls.append(1), exchange(*args, **kwargs))
    io, model = CheckpointIO(ProcessGroupIO()), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    verbs: dict[str, Callable[[], object]] = {
        "save_model": lambda: io.save_model(model, Path(folder, "model"), shard=True, use_safetensors=True),
        "load_model": lambda: io.load_model(model, Path(folder, "model")),
        "save_optimizer": lambda: io.save_optimizer(optimizer, Path(folder, "optimizer")),
        "load_optimizer": lambda: io.load_optimizer(optimizer, Path(folder, "optimizer")),
        "save_lr_scheduler": lambda: io.save_lr_scheduler(schedule, Path(folder, "schedule")),
        "load_lr_scheduler": lambda: io.load_lr_scheduler(schedule, Path(folder, "schedule")),
        "save_plain": lambda: io.save_plain(dict, Path(folder, "plain")),
        "load_plain": lambda: io.load_plain(Path(folder, "plain")),
        "synchronize": io.synchronize,
        "after": lambda: io.after(lambda: None),
    }
    counts = {}
    for name, verb in verbs.items():
        calls.clear()
        verb()
        counts[name] = len(calls)
    return counts


def test_the_documented_number_of_exchanges_is_the_real_one(tmp_path: Path) -> None:
    words = {"one": 1, "twice": 2, "three times": 3, "four times": 4, "five times": 5, "six times": 6}
    for counts in run_processes(_count_exchanges, 2, str(tmp_path)):
        for verb, count in counts.items():
            said = re.search(r"Communication: for `ProcessGroupIO` (\w+( times)?) all_gather_object", _doc(verb))
            assert said is not None, verb
            assert words[said[1]] == count, verb


def _doc(verb: str) -> str:
    return getattr(CheckpointIO, verb).__doc__ or ""
