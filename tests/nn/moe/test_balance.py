# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Biases balance experts on images of digits within 300 steps, and the model learns these."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from colossal.booster import Booster
from colossal.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.nn.moe import FeedForwardExperts, MixtureOfExperts, Router, update_expert_biases
from colossal.testing import run_processes

STEPS, BATCH, WIDTH, NUM_EXPERTS = 300, 128, 32, 8


class Net(nn.Module):
    """Each image is one token."""

    def __init__(self, bias_rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, WIDTH)
        router = Router(WIDTH, NUM_EXPERTS, 2, scores="sigmoid", renormalize=True, bias_rate=bias_rate)
        self.moe = MixtureOfExperts(router, FeedForwardExperts(NUM_EXPERTS, WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(images)
        output, routing = self.moe(hidden)
        return self.last(hidden + output), routing.tokens_per_expert


def train(bias_rate: float, plugin: Any, place: int = 0, parts: int = 1) -> tuple[torch.Tensor, float]:
    """The tokens of this rank that each expert got in the last 50 steps, and the accuracy."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    model: Any = Net(bias_rate)
    booster = Booster(device="cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    draw, total = torch.Generator().manual_seed(1), torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for step in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=draw).chunk(parts)[place]
        logits, tokens_per_expert = model(images[chosen])
        booster.backward(functional.cross_entropy(logits.float(), labels[chosen]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        update_expert_biases(model)
        total += tokens_per_expert * (step >= STEPS - 50)
    with torch.no_grad():
        logits, _ = model.eval()(images)
    return total, float((logits.argmax(1) == labels).double().mean())


def load_of(counts: torch.Tensor) -> float:
    """The load of the busiest expert over the mean one."""
    assert counts.sum() == 50 * 2 * BATCH
    return float(counts.max() / counts.double().mean())


def train_on_ranks(precision: str) -> tuple[torch.Tensor, float]:
    plugin = TorchDDPPlugin() if precision == "fp32" else LowLevelZeroPlugin(precision="bf16")
    with ParallelMesh(dp=2, ep=2) as mesh:
        return train(0.01, plugin, mesh.rank("dp"), 2)


@pytest.mark.slow
def test_biases_balance_experts() -> None:
    assert load_of(train(0.0, None)[0]) > 1.5
    for precision in ("fp32", "bf16"):
        (first, accuracy), (second, other) = run_processes(train_on_ranks, 2, precision)
        assert load_of(first + second) <= 1.2, precision
        assert min(accuracy, other) > 0.95, precision
