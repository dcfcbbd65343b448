"""Names, headers and files that no saver writes are a `CheckpointError`: no other exception, and no endless wait."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from colossal.checkpoint_io import CheckpointIO
from colossal.errors import CheckpointError

IO = CheckpointIO()


def model() -> nn.Module:
    return nn.Linear(2, 1)


def write_header(path: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))


@pytest.mark.parametrize("shape", ["12", ["1", "2"], [1.0, 2.0], [True, 2], {"1": 2}, None])
def test_a_shape_that_is_no_list_of_numbers(shape: Any, tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}
    write_header(
        tmp_path / "m.safetensors",
        {"weight": entry, "bias": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}},
    )
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        IO.load_model(model(), tmp_path / "m.safetensors")


def test_a_file_name_with_a_nul(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"weight": "model\0.safetensors", "bias": "model\0.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map"):
        IO.load_model(model(), tmp_path)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_pipe_instead_of_a_file(is_sharded: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    if is_sharded:
        index = {"metadata": {}, "weight_map": dict.fromkeys(("weight", "bias"), "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    path = tmp_path / "model.safetensors.index.json" if is_sharded else tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        IO.load_model(model(), path)


def test_states_of_an_optimizer_that_lack_a_tensor(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    IO.save_optimizer(optimizer, tmp_path / "adam", shard=True, size_per_shard=1 / 2**20)
    (index,) = (tmp_path / "adam").glob("*.index.json")
    content = json.loads(index.read_text())
    content["weight_map"].pop(next(iter(content["weight_map"])))
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="adam"):
        IO.load_optimizer(torch.optim.AdamW(model().named_parameters(), lr=0.1), tmp_path / "adam")


@pytest.mark.parametrize("strict", [True, False])
def test_two_values_of_tied_parameters(strict: bool, tmp_path: Path) -> None:
    tied: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    tied[2].weight = tied[0].weight
    before = tied[0].weight.detach().clone()
    torch.save({"0.weight": before + 1, "2.weight": before + 2}, tmp_path / "untied.bin")
    with pytest.raises(CheckpointError, match=r"1 with other values than what they are tied to in the model: 2.weight"):
        IO.load_model(tied, tmp_path / "untied.bin", strict=strict)
    assert torch.equal(tied[0].weight, before)
    torch.save({"0.weight": before + 1, "2.weight": before + 1}, tmp_path / "equal.bin")
    assert torch.equal(IO.load_model(tied, tmp_path / "equal.bin")[0].weight, before + 1)


def test_the_same_without_any_of_this(tmp_path: Path) -> None:
    state = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    save_file(state, tmp_path / "m.safetensors")
    assert torch.equal(IO.load_model(model(), tmp_path / "m.safetensors").state_dict()["weight"], state["weight"])
