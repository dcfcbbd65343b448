# pyright: reportArgumentType=false, reportCallIssue=false
"""A module that the plan of tensor parallelism does not name: ranks use it in the same steps, or are told at once."""

from functools import partial
from typing import Any

import torch
from equality import assert_equal
from families import build, inputs_of
from float64 import KeepFloat64
from plugins import HYBRID
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.testing import run_processes

FAMILY, NUM_STEPS = "llama-tied", 16
PLUGINS: dict[str, Any] = {
    "tp2": partial(HYBRID, 2, 1),
    "tp2, ZeRO-1": partial(HYBRID, 2, 1, zero_stage=1),
    "tp2, clipped": partial(HYBRID, 2, 1, max_norm=1.0),
    "Gemini, tp2": partial(GeminiPlugin, tp_size=2, precision="fp32"),
}


class Adapter(nn.Module):
    """Adds to the activations in some steps, on some ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, width * width, dtype=torch.float64).view(width, width) / width)
        self.is_used = True

    def forward(self, _module: nn.Module, _args: Any, y: torch.Tensor) -> torch.Tensor:
        return y + torch.tanh(y @ self.matrix) if self.is_used else y


def make() -> Any:
    model: Any = build(FAMILY)
    model.adapter = Adapter(model.config.hidden_size)
    model.model.layers[1].input_layernorm.register_forward_hook(model.adapter)
    return model


def train(plugin: str, unused: dict[int, int | None], num_steps: int = NUM_STEPS) -> Any:
    """Leave the adapter out in some steps, on one of the ranks or on all; return the parameters, or what is said."""
    model = make()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = inputs_of(FAMILY)
    for step in range(1, num_steps + 1):
        model.adapter.is_used = step not in unused or unused[step] == 1 - dist.get_rank()
        booster.backward(boosted(**inputs).loss, optimizer)
        try:
            optimizer.step()
        except ConfigError as error:
            return step, str(error)
        optimizer.zero_grad()
    return boosted.state_dict(only_rank_0=False)


def train_all(cases: list[Any]) -> list[Any]:
    with ParallelMesh(tp=2), KeepFloat64():
        return [train(*case) for case in cases]


def test_a_rank_that_leaves_a_module_out_is_told_in_that_step() -> None:
    plugins = list(PLUGINS)
    for found in run_processes(train_all, 2, [(plugin, {3: 1}) for plugin in plugins]):
        for plugin, (step, message) in zip(plugins, found, strict=True):
            assert step == 3, plugin
            assert "differ in this step" in message, plugin
            assert "gradients of adapter.matrix, whose replicas drift apart" in message, plugin
            assert "Choose a branch by what is equal on all" in message, plugin


def test_later_steps_are_compared_together() -> None:
    cases = [("tp2", {11: 0}), ("tp2", {11: 0, 12: 1}), ("tp2", {20: 1}, 32)]
    for found in run_processes(train_all, 2, cases):
        for (step, message), wanted, number in zip(found, (16, 16, 32), (8, 8, 16), strict=True):
            assert step == wanted
            assert f"differ in one of the last {number} steps" in message


def test_steps_in_which_no_rank_uses_a_module_equal_one_process() -> None:
    unused = dict.fromkeys((2, 3, 11))
    with KeepFloat64():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, NUM_STEPS + 1):
            model.adapter.is_used = step not in unused
            model(**inputs_of(FAMILY)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for found in run_processes(train_all, 2, [("tp2", unused), ("tp2, ZeRO-1", unused)]):
        for state in found:
            for name, value in model.state_dict().items():
                assert_equal(state[name], value, name)
