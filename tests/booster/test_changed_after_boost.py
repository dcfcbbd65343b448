# pyright: reportArgumentType=false, reportCallIssue=false
"""What is changed in a model after it was boosted counts, or an error says what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from plugins import plugins
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import TorchFSDPPlugin
from colossal.errors import ColossalError, ConfigError, UnsupportedError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1")
PLUGINS |= {"FSDP, SHARD_GRAD_OP": partial(TorchFSDPPlugin, sharding_strategy="SHARD_GRAD_OP")}
DATA = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
CHANGES: dict[str, Callable[[Any], None]] = {
    "a layer": lambda model: model.__setitem__(2, nn.Linear(8, 2).double()),
    "a parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 6).double())),
    "a layer more": lambda model: model.append(nn.Linear(2, 2).double()),
    "a frozen layer": lambda model: model.append(nn.Linear(2, 2).double().requires_grad_(False)),
}


def change(plugin: str, kind: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for number, x in enumerate(DATA):
            if number == 1:
                CHANGES[kind](boosted.unwrap())
            booster.backward(boosted(x.chunk(2)[dist.get_rank()]).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    except ColossalError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def change_all(kinds: list[str]) -> dict[tuple[str, str], str]:
    return {(plugin, kind): change(plugin, kind) for plugin in PLUGINS for kind in kinds}


@pytest.mark.parametrize(
    "kinds",
    [["a parameter", "a frozen layer"], pytest.param(["a layer", "a layer more"], marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_modules_and_parameters_that_are_replaced_are_refused(kinds: list[str]) -> None:
    first, second = run_processes(change_all, 2, kinds)
    assert first == second
    for (plugin, kind), message in first.items():
        if kind == "a frozen layer":
            assert message == "", plugin
        else:
            assert message.startswith("ConfigError"), (plugin, kind, message)
            assert "before boost" in message or "find_unused_parameters" in message, (plugin, kind, message)


class Sliced(nn.Module):
    """Makes a list of modules in each forward pass, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return x


def count_walks(plugin: str) -> tuple[int, str]:
    """Count how often steps look at all modules; then give one of the layers another parameter."""
    model: Any = Sliced()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD([*model.layers[:2].parameters()], lr=0.1))

    def step() -> None:
        booster.backward(boosted(DATA[0]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with mock.patch.object(nn.Module, "named_modules", autospec=True, side_effect=nn.Module.named_modules) as walk:
        step()
    model.layers[1].bias = nn.Parameter(torch.ones(6, dtype=torch.float64))
    try:
        step()
    except ColossalError as error:
        return walk.call_count, str(error)
    return walk.call_count, ""


def test_lists_of_modules_that_passes_make_are_no_change() -> None:
    for num_walks, message in run_processes(count_walks, 2, "ZeRO-1"):
        assert num_walks == 0
        assert "Found gradients of 1 others, such as layers.1.bias" in message


def optimize_afterwards(plugin: str) -> str:
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, *_ = booster.boost(nn.Linear(6, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        model(DATA[0]).sum().backward()
        optimizer.step()
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plugin", ["Gemini", "ZeRO-1", "ZeRO-2"])
def test_an_optimizer_that_is_built_afterwards_is_refused_with_its_place(plugin: str) -> None:
    for message in run_processes(optimize_afterwards, 2, plugin):
        assert "optimizer" in message
        assert "to boost" in message
