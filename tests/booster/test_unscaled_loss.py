"""`loss.backward()` instead of `booster.backward` under loss scaling is an error, under every plugin that scales."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossal.errors import ConfigError
from colossal.testing import run_threads

WAYS: dict[str, Callable[[], Booster]] = {
    "autocast": lambda: Booster(device="cpu", mixed_precision="fp16"),
    "float32 copies": lambda: Booster(device="cpu", mixed_precision="fp16_naive"),
    "DDP": lambda: Booster(device="cpu", mixed_precision="fp16", plugin=TorchDDPPlugin()),
    "ZeRO-1": lambda: Booster(device="cpu", plugin=LowLevelZeroPlugin()),
    "ZeRO-2": lambda: Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=2)),
    "Gemini": lambda: Booster(device="cpu", plugin=GeminiPlugin()),
    "Hybrid": lambda: Booster(device="cpu", plugin=HybridParallelPlugin(1, 1)),
}


def step_without_booster(way: str) -> str:
    booster = WAYS[way]()
    net = nn.Linear(4, 2)
    model: Any
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert optimizer is not None
    model(torch.ones(3, 4)).sum().backward()
    try:
        optimizer.step()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_backward_pass_is_an_error_at_the_step(way: str) -> None:
    for found in run_threads(step_without_booster, 2, way):
        assert found.startswith("Under loss scaling, gradients come from booster.backward(loss, optimizer), which")
        assert "by 65536." in found
