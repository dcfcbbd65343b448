"""Steps of the optimizer that was passed to `boost`: right where it holds the parameters, else refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.interface.direct_steps import DirectSteps
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossal.errors import ConfigError
from colossal.interface import OptimizerWrapper
from colossal.testing import run_threads

REFUSED: dict[str, Callable[[], Any]] = {
    "ZeRO-1": partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "ZeRO-2, fp16": partial(LowLevelZeroPlugin, stage=2, precision="fp16"),
    "Gemini": partial(GeminiPlugin, precision="fp32"),
    "Hybrid, bf16": partial(HybridParallelPlugin, 1, 1, precision="bf16"),
}


def train(plugin: Callable[[], Any], is_refused: bool) -> None:
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    booster = Booster(device="cpu", plugin=plugin())
    boosted, optimizer, *_ = booster.boost(model, sgd)

    def step(stepped: torch.optim.Optimizer | Any) -> None:
        booster.backward(boosted(torch.ones(2, 4)).float().mean(), optimizer)
        stepped.step()
        optimizer.zero_grad()

    step(optimizer)
    if is_refused:
        with pytest.raises(ConfigError, match="Found a step of SGD itself, which holds master weights or shards"):
            step(sgd)
        step(optimizer)  # as before
    else:
        step(sgd)


@pytest.mark.parametrize("plugin", REFUSED)
def test_steps_past_the_wrapper_are_refused_where_they_would_train_nothing(plugin: str) -> None:
    run_threads(partial(train, REFUSED[plugin], is_refused=True), 2)


def test_steps_past_the_wrapper_are_right_where_it_holds_the_parameters() -> None:
    run_threads(partial(train, TorchDDPPlugin, is_refused=False), 2)


def test_an_optimizer_that_is_wrapped_again_has_forgotten_its_first_wrapper() -> None:
    sgd = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    DirectSteps.watch(sgd, has_masters=True)
    with pytest.raises(ConfigError, match="itself"):
        sgd.step()
    OptimizerWrapper(sgd)
    sgd.step()
