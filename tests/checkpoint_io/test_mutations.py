"""A damaged file is an error that names it, or does no harm: never a crash, never a wrong value."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import ALL
from torch import nn

from colossal.checkpoint_io import CheckpointIO
from colossal.errors import CheckpointError
from colossal.interface import OptimizerWrapper

IO = CheckpointIO()
MUTATIONS_PER_KIND = 250 if ALL else 60
SMALL = 1 / 2**11  # size_per_shard, in MB


def build(seed: int) -> tuple[nn.Module, OptimizerWrapper]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4).bfloat16(), nn.Embedding(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, OptimizerWrapper(optimizer, param_names={p: name for name, p in model.named_parameters()})


def flip(content: bytearray, draw: random.Random) -> bytearray:
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def flip_in_the_head(content: bytearray, draw: random.Random) -> bytearray:
    content[draw.randrange(min(len(content), 2000))] ^= 1 << draw.randrange(8)
    return content


def truncate(content: bytearray, draw: random.Random) -> bytearray:
    return content[: draw.randrange(len(content))]


def extend(content: bytearray, draw: random.Random) -> bytearray:
    return content + draw.randbytes(draw.randrange(1, 64))


def overwrite(content: bytearray, draw: random.Random) -> bytearray:
    start, length = draw.randrange(len(content)), draw.randrange(1, 65)
    content[start : start + length] = draw.choice([bytes(length), draw.randbytes(length)])
    return content


def swap(content: bytearray, draw: random.Random) -> bytearray:
    length = draw.randrange(1, 33)
    a, b = (draw.randrange(max(1, len(content) - length)) for _ in range(2))
    first, second = content[a : a + length], content[b : b + length]
    content[a : a + length], content[b : b + length] = second, first
    return content


def cut_out(content: bytearray, draw: random.Random) -> bytearray:
    start = draw.randrange(len(content))
    del content[start : start + draw.randrange(1, 65)]
    return content


def replace_by_noise(content: bytearray, draw: random.Random) -> bytearray:
    return bytearray(draw.randbytes(draw.choice([0, 3, len(content)])))


MUTATIONS = [flip, flip, flip_in_the_head, truncate, extend, overwrite, swap, cut_out, replace_by_noise]


def saved_files(path: Path) -> list[Path]:
    return sorted(entry for entry in (path.rglob("*") if path.is_dir() else [path]) if entry.is_file())


def state_of(value: Any) -> dict[str, Any]:
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    content = value.state_dict()
    flat = {f"{i}/{key}": item for i, entry in content["state"].items() for key, item in entry.items()}
    return flat | {str(number): str(group) for number, group in enumerate(content["param_groups"])}


def assert_same(found: Any, expected: dict[str, Any], what: str) -> None:
    content = state_of(found)
    assert content.keys() == expected.keys(), what
    for name, value in expected.items():
        same = torch.equal(content[name], value) if isinstance(value, torch.Tensor) else content[name] == value
        assert same, f"{what} loaded a wrong {name} without an error"


def refusal_of(target: Any, path: Path) -> str | None:
    """Load; return the text of the error, None if there was none. Anything but a CheckpointError passes through."""
    try:
        IO.load_model(target, path) if isinstance(target, nn.Module) else IO.load_optimizer(target, path)
    except CheckpointError as error:
        return str(error)
    return None


Save = Callable[[nn.Module, OptimizerWrapper, Path], None]
KINDS: dict[str, tuple[Save, int]] = {
    "model": (lambda m, _, path: IO.save_model(m, path, use_safetensors=True), 0),
    "sharded-model": (lambda m, _, p: IO.save_model(m, p, shard=True, use_safetensors=True, size_per_shard=SMALL), 0),
    "torch-model": (lambda m, _, path: IO.save_model(m, path), 0),
    "sharded-torch-model": (lambda m, _, p: IO.save_model(m, p, shard=True, size_per_shard=SMALL), 0),
    "optimizer": (lambda _, o, path: IO.save_optimizer(o, path), 1),
    "sharded-optimizer": (lambda _, o, path: IO.save_optimizer(o, path, shard=True, size_per_shard=SMALL), 1),
}


@pytest.mark.chosen
@pytest.mark.parametrize("kind", KINDS)
def test_no_mutation_crashes_or_goes_unseen(tmp_path: Path, kind: str) -> None:
    save, part = KINDS[kind]
    model, optimizer = build(0)
    save(model, optimizer, tmp_path / "whole")
    expected = {
        k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state_of((model, optimizer)[part]).items()
    }
    draw = random.Random(kind)  # noqa: S311 - repeatable on purpose
    refused = 0
    for number in range(MUTATIONS_PER_KIND):
        mutation = draw.choice(MUTATIONS)
        what = f"{kind} number {number}, {mutation.__name__}"
        path = tmp_path / "mutant"
        (shutil.copytree if (tmp_path / "whole").is_dir() else shutil.copyfile)(tmp_path / "whole", path)
        victim = draw.choice(saved_files(path))
        content = mutation(bytearray(victim.read_bytes()), draw)
        victim.write_bytes(content)
        target = build(1)[part]
        message = refusal_of(target, path)
        if message is None:
            assert_same(target, expected, what)
        else:
            refused += 1
            assert str(path) in message, what
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert refused > MUTATIONS_PER_KIND // 2, "the mutations must do harm for the test to say anything"


def test_a_flipped_bit_names_the_tensor(tmp_path: Path) -> None:
    model, _ = build(0)
    IO.save_model(model, tmp_path / "model", use_safetensors=True)
    content = bytearray((tmp_path / "model").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor '2\.bias' of .*model damaged.*do not fit the digest"):
        IO.load_model(model, tmp_path / "model")


def test_shards_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    for seed in (0, 1):
        IO.save_model(build(seed)[0], tmp_path / str(seed), shard=True, use_safetensors=True, size_per_shard=SMALL)
    shard = min((tmp_path / "0").glob("*-of-*"))
    shutil.copyfile(tmp_path / "1" / shard.name, shard)
    with pytest.raises(CheckpointError, match=rf"must come from one save. Found .*{shard.name}"):
        IO.load_model(build(2)[0], tmp_path / "0")
