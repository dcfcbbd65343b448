"""Buffers that differ between ranks: a checkpoint has those of the first rank, in every format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import plugins
from safetensors.torch import load_file
from torch import nn

from colossal.booster import Booster
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1")
DATA = torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(5))


class Codebook(nn.Module):
    """Follows the mean of what it sees, as the codes of a vector quantization do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(64, size))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.codes = self.codes * 0.9 + x.detach().mean(0) * 0.1  # another tensor in each pass
            self.seen += len(x)
        return x - self.codes.mean(0)


def build(plugin: str) -> tuple[Booster, Any, Any, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Codebook(8), nn.Linear(8, 2))
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return booster, model, optimizer, net


def train(booster: Booster, model: Any, optimizer: Any, data: torch.Tensor) -> None:
    rank, size = booster.plugin.data_parallel_rank_and_size()
    for x in data:
        booster.backward(model(x.chunk(size)[rank]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def save_and_resume(plugins: list[str], root: str) -> None:
    for plugin in plugins:
        folder, first = f"{root}/{plugin}", torch.distributed.get_rank() == 0
        booster, model, optimizer, net = build(plugin)
        train(booster, model, optimizer, DATA[:3])
        booster.save(folder, model, optimizer, step=3)
        booster.save_model(model, f"{folder}.safetensors")
        booster.save_model(model, f"{folder}.bin")
        booster.save_model(model, f"{folder}/sharded", shard=True, use_safetensors=True, size_per_shard=1)
        of_this_rank = {name: value.clone() for name, value in net.named_buffers()}
        files = [
            load_file(next(Path(folder).glob("step-*/model/*.safetensors"))),
            load_file(f"{folder}.safetensors"),
            torch.load(f"{folder}.bin"),
            load_file(next(Path(folder, "sharded").glob("*.safetensors"))),
        ]
        for number, file in enumerate(files):
            same = [name for name, value in of_this_rank.items() if torch.equal(file[name], value)]
            expected = list(of_this_rank) if first else ["1.num_batches_tracked", "2.seen"]
            assert same == expected, f"{plugin}, file {number}, rank {torch.distributed.get_rank()}"
        train(booster, model, optimizer, DATA[3:])
        expected_values = [value.clone() for value in net.buffers()]

        booster, model, optimizer, net = build(plugin)
        booster.load(folder, model, optimizer)
        train(booster, model, optimizer, DATA[3:])
        for found, wanted in zip(net.buffers(), expected_values, strict=True):
            assert torch.equal(found, wanted), plugin


@pytest.mark.parametrize("plugins", [list(PLUGINS)[:4], list(PLUGINS)[4:]])
def test_a_file_has_the_buffers_of_the_first_rank(plugins: list[str], tmp_path: Path) -> None:
    run_processes(save_and_resume, 2, plugins, str(tmp_path))
