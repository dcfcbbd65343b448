"""Parameters and optimizer states that should be equal on ranks and are not are named when they are saved."""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, inputs_of
from safetensors.torch import save_file
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.errors import CheckpointError
from colossal.testing import run_processes


class Lines(logging.Handler):
    """Keeps the warnings of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []
        logging.getLogger("colossal").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def take(self) -> list[str]:
        taken, self.found = [line for line in self.found if "Replicas of a parameter" in line], []
        return taken


REPLICATED: dict[str, Callable[[], Any]] = {
    "DDP": TorchDDPPlugin,
    "ZeRO-1": partial(LowLevelZeroPlugin, precision="fp32"),
    "Hybrid": partial(HybridParallelPlugin, 1, 1, precision="fp32"),
}
ALL = {
    **REPLICATED,
    "FSDP": TorchFSDPPlugin,
    "Gemini": partial(GeminiPlugin, precision="fp32"),
    "Hybrid tp2": partial(HybridParallelPlugin, 2, 1, precision="fp32"),
    "Hybrid pp2": partial(HybridParallelPlugin, 1, 2, num_microbatches=2, precision="fp32"),
}


def loss_of(outputs: Any, _: object) -> torch.Tensor:
    return outputs.mean() if isinstance(outputs, torch.Tensor) else outputs.loss


def train(plugin: str, model: nn.Module, batch: Any) -> tuple[Booster, Any, Any, int]:
    booster = Booster(device="cpu", plugin=ALL[plugin]())
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=0.1))
    rank = torch.distributed.get_rank()
    _, size = booster.plugin.data_parallel_rank_and_size()
    for _ in range(2):
        part = {name: value.chunk(size)[rank % size] for name, value in batch.items()}
        booster.execute_pipeline(iter([part]), model, loss_of, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, optimizer, rank


def drift(plugin: str, folder: str) -> list[list[str]]:
    """What is warned of: nothing at first, then a parameter, then a moment."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # whose statistics differ
    booster, model, optimizer, rank = train(plugin, net, {"input": torch.randn(8, 6) + torch.arange(8)[:, None]})
    lines, path = Lines(), Path(folder)
    booster.save(path / "first", model, optimizer)
    found = [lines.take()]
    with torch.no_grad():
        net[2].bias[0] += 1e-6 * rank
    for use_async in (False, True):
        booster.save_model(model, path / f"model{use_async}.safetensors", use_async=use_async)
        found.append(lines.take())
    booster.checkpoint_io.synchronize()
    if plugin != "ZeRO-1":  # which partitions the moments
        optimizer.unwrap().state[net[0].weight]["exp_avg"][0, 0] += 1e-6 * rank
    booster.save_optimizer(optimizer, path / "optimizer", shard=True)
    return [*found, lines.take()]


@pytest.mark.parametrize("plugin", REPLICATED)
def test_replicas_that_differ_are_named_once(plugin: str, tmp_path: Path) -> None:
    (clean, first, second, moment), *others = run_processes(drift, 2, plugin, str(tmp_path))
    assert clean == []
    for (line,) in (first, second):
        assert "on some of the ranks [0, 1] of 2.bias: the checkpoint" in line
    assert len(moment) == (plugin != "ZeRO-1")
    assert all("on some of the ranks [0, 1] of 0.weight/exp_avg: the checkpoint" in line for line in moment), moment
    assert others == [[[], [], [], []]]


def save_equal(plugin: str, folder: str) -> list[str]:
    lines = Lines()
    inputs = inputs_of("llama-tied")
    booster, model, optimizer, _ = train(plugin, build("llama-tied"), inputs)
    booster.save(Path(folder), model, optimizer, use_async=True)
    booster.checkpoint_io.synchronize()
    return lines.take()


@pytest.mark.parametrize("plugin", ALL)
def test_equal_replicas_are_not_named(plugin: str, tmp_path: Path) -> None:
    """Layers that are sharded, in stages or tied are equal where they are replicated."""
    assert run_processes(save_equal, 2, plugin, str(tmp_path)) == [[], []]


def drift_in_tp(folder: str) -> list[str]:
    lines, net = Lines(), build("llama-tied")
    booster, model, _, rank = train("Hybrid tp2", net, inputs_of("llama-tied"))
    with torch.no_grad():
        model.unwrap().model.layers[0].input_layernorm.weight += rank
    booster.save_model(model, Path(folder, "model"), shard=True)
    return lines.take()


def test_what_tensor_parallel_ranks_replicate_is_compared(tmp_path: Path) -> None:
    (line,), more = run_processes(drift_in_tp, 2, str(tmp_path))
    assert "of model.layers.0.input_layernorm.weight: the checkpoint has" in line
    assert not more


def load_own_files(folder: str) -> dict[str, str]:
    """Load what each rank has on a disk of its own, and say what came of it."""
    found = {}
    rank = torch.distributed.get_rank()
    for plugin in ("DDP", "ZeRO-1", "FSDP", "Gemini"):
        booster = Booster(device="cpu", plugin=ALL[plugin]())
        model, *_ = booster.boost(nn.Linear(4, 4))
        for name in ("equal", "other", "other.safetensors", "other.pt"):
            try:
                booster.load_model(model, Path(folder) / f"rank{rank}" / name)
                found[f"{plugin}, {name}"] = "loaded"
            except CheckpointError as error:
                found[f"{plugin}, {name}"] = str(error)
    return found


def test_ranks_that_have_other_files_are_refused(tmp_path: Path) -> None:
    booster, same = Booster(device="cpu"), nn.Linear(4, 4)
    for rank in range(2):
        folder, model = tmp_path / f"rank{rank}", nn.Linear(4, 4)
        folder.mkdir()
        booster.save_model(model, folder / "other", shard=True, use_safetensors=True)
        save_file(dict(model.state_dict()), folder / "other.safetensors")  # as another program writes it
        torch.save(model.state_dict(), folder / "other.pt")
        if rank == 0:
            booster.save_model(same, folder / "equal", shard=True, use_safetensors=True)
        else:
            shutil.copytree(tmp_path / "rank0" / "equal", folder / "equal")
    for found in run_processes(load_own_files, 2, str(tmp_path)):
        for case, said in found.items():
            if case.endswith("equal"):
                assert said == "loaded", case
            else:
                assert said.startswith("All ranks load the same files. Found others on ranks [1] than on rank 0"), case
