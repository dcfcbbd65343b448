"""Under ZeRO, where optimizers hold ranges of parameters, models are trained as in one process."""

import pytest
import torch
from optimizers import CASES, draw
from torch import nn

from colossal._src.zero import Partitions, ZeroConfig, shard_optimizer
from colossal.cluster import ParallelMesh
from colossal.testing import run_threads

NAMES = ("CPUAdam", "FusedSGD, momentum", "Lamb", "FusedLAMB", "Lars", "Adafactor", "CAME, decay", "GaLoreAdamW")
STEPS, RANKS = 3, 3


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    for seed, param in enumerate(model.parameters()):
        param.data.copy_(draw(param.shape, 100 + seed))
    return model


def batch(step: int) -> torch.Tensor:
    return draw((2 * RANKS, 5), step)


def under_zero(name: str, stage: int) -> list[torch.Tensor]:
    model = model_of()
    mesh = ParallelMesh()
    optimizer = shard_optimizer(
        model, CASES[name].build(list(model.parameters())), Partitions(mesh), ZeroConfig(stage=stage)
    )
    for step in range(STEPS):
        optimizer.backward(model(batch(step).chunk(RANKS)[mesh.rank("dp")]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(name) -> None:
    model = model_of()
    optimizer = CASES[name].build(list(model.parameters()))
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (1, 2):
        for found in run_threads(under_zero, RANKS, name, stage):
            for param, wanted in zip(found, model.parameters(), strict=True):
                torch.testing.assert_close(param, wanted.detach(), rtol=1e-10, atol=1e-12)
