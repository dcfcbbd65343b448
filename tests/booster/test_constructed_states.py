# pyright: reportArgumentType=false, reportCallIssue=false
"""Optimizers that make their state when they are built train a sharded model as in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build
from float64 import KeepFloat64
from plugins import plugins
from torch import distributed as dist

from colossal.booster import Booster
from colossal.errors import ConfigError
from colossal.testing import run_processes

PLUGINS = plugins("tp2", "pp2", "Gemini, tp2", "Hybrid", "Hybrid with ZeRO-1")
IDS = (torch.arange(48) * 7 % 31).view(2, 4, 6)


class SignOfMean(torch.optim.Optimizer):
    """A user's own, which counts steps, and averages gradients, from its constructor on."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": 0, "mean": torch.zeros_like(parameter), "scale": torch.ones(())}

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] += 1
                    state["mean"].lerp_(parameter.grad, 0.5)
                    parameter.sub_(state["mean"] / (1 - 0.5 ** state["step"]) * state["scale"], alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, eps=1e-4),
    "Adagrad from 0.1": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "own": SignOfMean,
}


def train(plugin: str, booster: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        batch = {"input_ids": IDS[step % 2], "labels": IDS[step % 2]}
        if booster is None:
            model(**batch).loss.backward()
        else:
            if plugin.startswith("Hybrid"):
                batch = {name: value.chunk(2)[dist.get_rank()] for name, value in batch.items()}
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def boosted(plugin: str, kind: str) -> tuple[Booster, Any, Any]:
    model, booster = build("llama").double(), Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[kind](model.parameters()))
    return booster, model, optimizer


def resume(plugin: str, kind: str, folder: str) -> None:
    booster, model, optimizer = boosted(plugin, kind)
    train(plugin, booster, model, optimizer, range(2))
    booster.save_model(model, f"{folder}/model", shard=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    booster, model, optimizer = boosted(plugin, kind)
    booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    train(plugin, booster, model, optimizer, range(2, 3))
    booster.save_model(model, f"{folder}/end", shard=True, use_safetensors=False)


def run_all(cases: list[tuple[str, str]], folder: str) -> None:
    with KeepFloat64():
        for plugin, kind in cases:
            resume(plugin, kind, f"{folder}/{plugin}-{kind}")


FAST = [("tp2", "Adagrad"), ("pp2", "Adagrad from 0.1"), ("Gemini, tp2", "own")]


@pytest.mark.parametrize(
    "cases",
    [FAST, pytest.param([(p, o) for p in PLUGINS for o in OPTIMIZERS if (p, o) not in FAST], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_states_of_constructors_are_sharded(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    run_processes(run_all, 2, cases, str(tmp_path))
    for kind, build_optimizer in OPTIMIZERS.items():
        model = build("llama").double()
        with KeepFloat64():
            train("", None, model, build_optimizer(model.parameters()), range(3))
        for plugin in (plugin for plugin, other in cases if other == kind):
            state: dict[str, torch.Tensor] = {}
            for file in sorted((tmp_path / f"{plugin}-{kind}" / "end").glob("*.bin")):
                state |= torch.load(file)
            assert state.keys() == model.state_dict().keys()
            for name, value in model.state_dict().items():
                assert_equal(state[name], value, f"{plugin}, {kind}, {name}")


def boost_odd_states(_: None) -> Any:
    found = {}
    for plugin in ("tp2", "pp2", "Gemini, tp2"):
        model = build("llama")
        optimizer = torch.optim.Adagrad(model.parameters())
        optimizer.state[next(model.parameters())]["sum"][0, 0] = 1
        try:
            Booster(device="cpu", plugin=PLUGINS[plugin]()).boost(model, optimizer)
        except ConfigError as error:
            found[plugin] = str(error)
    return found


def test_states_of_steps_are_refused() -> None:
    for rank in run_processes(boost_odd_states, 2, None):
        assert all("before its first step" in rank[plugin] for plugin in ("tp2", "pp2", "Gemini, tp2"))
