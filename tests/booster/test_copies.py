# pyright: reportArgumentType=false, reportCallIssue=false
"""Copies of a boosted model, such as averages of weights, are those of one process, or an error says how to average."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from float64 import KeepFloat64
from plugins import plugins
from small_models import BATCHES, DIVIDING, batch_of, loss_of, net
from torch import distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from colossal.booster import Booster
from colossal.booster.plugin import LowLevelZeroPlugin
from colossal.errors import UnsupportedError
from colossal.testing import run_processes

COPIED = plugins("DDP", "ZeRO-1", "ZeRO-2", "Hybrid", "Hybrid with ZeRO-1", "tp2", "pp2")
REFUSED = plugins("FSDP", "Gemini", "Gemini, tp2")
REFUSED |= {"ZeRO-1, overlapped": partial(LowLevelZeroPlugin, precision="fp32", overlap_allgather=True)}
DECAY = 0.5


def train_step(plugin: str, booster: Any, model: Any, optimizer: Any, step: int) -> None:
    batch = batch_of(plugin, step)
    if booster is None:
        loss_of(model, batch).backward()
    elif plugin in DIVIDING:
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
    else:
        booster.backward(loss_of(model, batch.chunk(2)[dist.get_rank()]), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def expected(plugin: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """The average, the model and the loss of the average after three steps of one process."""
    with KeepFloat64():
        model = net(plugin)
        optimizer, average = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), ema(model)
        for step in range(3):
            train_step(plugin, None, model, optimizer, step)
            average.update_parameters(model)
        return average.module.state_dict(), model.state_dict(), loss_of(average, batch_of(plugin, 0)).item()


def boosted(plugin: str) -> tuple[Booster, Any, Any]:
    booster, model = Booster(device="cpu", plugin=(COPIED | REFUSED)[plugin]()), net(plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    return booster, model, optimizer


def average_copies(plugin: str, folder: str) -> tuple[Any, Any, float | None]:
    booster, model, optimizer = boosted(plugin)
    average = ema(model)
    for step in range(3):
        train_step(plugin, booster, model, optimizer, step)
        average.update_parameters(model)
    booster.save_model(average.module, f"{folder}/average", shard=True, use_safetensors=False)
    booster.save_model(model, f"{folder}/model", shard=True, use_safetensors=False)
    dist.barrier()
    loss = None if plugin == "pp2" else loss_of(average, batch_of(plugin, 0)).item()
    read = lambda name: [torch.load(file) for file in sorted(Path(folder, name).glob("*.bin"))]  # noqa: E731
    return read("average"), read("model"), loss


def average_states(plugin: str) -> Any:
    """What the error says."""
    booster, model, optimizer = boosted(plugin)
    messages = []
    for make_copy in (copy.deepcopy, ema):
        with pytest.raises(UnsupportedError) as caught:
            make_copy(model)
        messages.append(str(caught.value))
    average: dict[str, torch.Tensor] = {}
    for step in range(3):
        train_step(plugin, booster, model, optimizer, step)
        for name, value in model.state_dict(only_rank_0=False).items():
            average.setdefault(name, value).lerp_(value, 1 - DECAY)
    return messages, average


def run_all(plugins: tuple[str, ...], folder: str) -> Any:
    with KeepFloat64():
        return (
            {plugin: average_copies(plugin, f"{folder}/{plugin}") for plugin in plugins if plugin in COPIED},
            {plugin: average_states(plugin) for plugin in plugins if plugin in REFUSED},
        )


FAST = ("DDP", "ZeRO-1", "tp2", "pp2", "FSDP", "Gemini")
OTHERS = tuple(plugin for plugin in COPIED | REFUSED if plugin not in FAST)


@pytest.mark.parametrize("plugins", [FAST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_averages_of_weights_are_those_of_one_process(plugins: tuple[str, ...], tmp_path: Path) -> None:
    alone = {plugin: expected(plugin) for plugin in ("DDP", "tp2")}
    for copied, refused in run_processes(run_all, 2, plugins, str(tmp_path)):
        for plugin, (average, model, loss) in copied.items():
            wanted = alone["tp2" if plugin in DIVIDING else "DDP"]
            for files, state in ((average, wanted[0]), (model, wanted[1])):
                found = {name: value for file in files for name, value in file.items()}
                assert found.keys() == state.keys(), plugin
                for name, value in found.items():
                    assert_equal(value, state[name], f"{plugin}, {name}")
            assert loss is None or abs(loss - wanted[2]) < 1e-12, plugin
        for plugin, (messages, average) in refused.items():
            assert all("state_dict(only_rank_0=False)" in message for message in messages)
            for name, value in alone["tp2" if plugin in DIVIDING else "DDP"][0].items():
                assert_equal(average[name], value, f"{plugin}, {name}")


def copies_of_one_rank(plugin: str) -> bool:
    """One rank evaluates a copy with running statistics, and all train on."""
    booster = Booster(device="cpu", plugin=COPIED[plugin]())
    model: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = AveragedModel(model, use_buffers=True)
    before = {name: value.clone() for name, value in average.module.unwrap().state_dict().items()}
    for step in range(2):
        booster.backward(model(BATCHES[step]).square().mean(), optimizer)
        if step == 0 and dist.get_rank() == 0:
            copied = copy.deepcopy(model)
            copied(BATCHES[1]).sum().backward()
            assert all(parameter.grad is not None for parameter in copied.parameters())
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return not torch.equal(average.module.unwrap().state_dict()["1.running_mean"], before["1.running_mean"])


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-1", "Hybrid"])
def test_one_rank_may_evaluate_a_copy(plugin: str) -> None:
    assert run_processes(copies_of_one_rank, 2, plugin) == [True, True]
