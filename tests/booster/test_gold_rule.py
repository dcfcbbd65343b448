"""Same seed, same data: N ranks equal one rank, in loss, gradients and parameters after several steps."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16TorchMixedPrecision
from colossal.booster.plugin import TorchDDPPlugin
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.testing import TOLERANCES, assert_same_on_all_ranks, run_processes

GLOBAL_BATCH = 48
STEPS = 12
LR = {"AdamW": 0.01, "SGD": 1.0}


@dataclass(frozen=True)
class Recipe:
    """What a training run does besides a plain step."""

    accumulate: int = 1
    max_norm: float | None = None
    clip_value: float | None = None
    precision: Any = None
    optimizer: str = "AdamW"
    ddp: dict[str, Any] = field(default_factory=dict)


def build_model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))


def train(recipe: Recipe, world_size: int, parallel: bool = True) -> dict[str, Any]:
    """Train for a few steps on this rank's part of the digits and return what must not depend on the world."""
    plugin = TorchDDPPlugin(**recipe.ddp) if parallel else None
    booster = Booster(device="cpu", plugin=plugin, mixed_precision=recipe.precision)
    model = build_model()
    optimizer = getattr(torch.optim, recipe.optimizer)(model.parameters(), lr=LR[recipe.optimizer])
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=STEPS, warmup_steps=2)
    batch = GLOBAL_BATCH // world_size // recipe.accumulate
    loader = booster.plugin.prepare_dataloader(digits(), batch, shuffle=True, drop_last=True)
    model, optimizer, criterion, loader, schedule = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), loader, schedule
    )
    batches = iter(loader)
    losses, gradients, norms = [], [], []
    for _ in range(STEPS):
        losses.append(step(booster, model, optimizer, criterion, batches, recipe))
        if recipe.max_norm is not None:
            norms.append(optimizer.clip_grad_by_norm(recipe.max_norm))
        if recipe.clip_value is not None:
            optimizer.clip_grad_by_value(recipe.clip_value)
        optimizer.unscale_grad()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if parallel:
        for parameter in model.parameters():
            assert_same_on_all_ranks(parameter)
    names = {name: parameter.detach().clone() for name, parameter in model.unwrap().named_parameters()}
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "norms": norms,
        "parameters": names,
        "scale": optimizer.scaler.scale_value,
    }


def step(booster, model, optimizer, criterion, batches, recipe: Recipe) -> torch.Tensor:
    total = torch.zeros(())
    for micro in range(recipe.accumulate):
        images, labels = next(batches)
        if micro < recipe.accumulate - 1:
            with booster.no_sync(model):
                loss = criterion(model(images), labels) / recipe.accumulate
                booster.backward(loss, optimizer)
        else:
            loss = criterion(model(images), labels) / recipe.accumulate
            booster.backward(loss, optimizer)
        total += loss.detach()
    return total


# The half precisions round each product, and the order of sums differs with the batch of a rank.
RECIPES = {
    "plain": (Recipe(), torch.float32),
    "SGD": (Recipe(optimizer="SGD"), torch.float32),
    "accumulation": (Recipe(accumulate=3), torch.float32),
    "clip by norm": (Recipe(max_norm=0.5), torch.float32),
    "clip by value": (Recipe(clip_value=0.01), torch.float32),
    "accumulation and clip": (Recipe(accumulate=2, max_norm=0.5, clip_value=0.05), torch.float32),
    "bucket views, small buckets": (
        Recipe(ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
        torch.float32,
    ),
    "static graph": (Recipe(ddp={"static_graph": True, "find_unused_parameters": False}), torch.float32),
    "bf16": (Recipe(precision="bf16", optimizer="SGD"), torch.bfloat16),
    "bf16, accumulation, clip": (Recipe(accumulate=2, max_norm=0.5, precision="bf16", optimizer="SGD"), torch.bfloat16),
    "fp16, clip": (
        Recipe(precision=FP16TorchMixedPrecision(init_scale=2.0**10), max_norm=0.5, optimizer="SGD"),
        torch.float16,
    ),
}


def train_all(parallel: bool) -> dict[str, dict[str, Any]]:
    return {name: train(recipe, dist.get_world_size(), parallel) for name, (recipe, _) in RECIPES.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_processes(train_all, 1, parallel=False, timeout_seconds=300)[0]


@pytest.fixture(scope="module")
def worlds() -> dict[int, list[dict[str, dict[str, Any]]]]:
    return {size: run_processes(train_all, size, parallel=True, timeout_seconds=300) for size in (1, 2, 4)}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_ranks_trains_like_one(name, size, alone, worlds) -> None:
    compare([rank[name] for rank in worlds[size]], alone[name], RECIPES[name][1], f"{name}, {size} ranks")


def compare(ranks: list[dict[str, Any]], alone: dict[str, Any], dtype: torch.dtype, name: str) -> None:
    tolerance = TOLERANCES[dtype]

    def close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            actual, expected, rtol=tolerance.rtol, atol=tolerance.atol, msg=lambda text: f"{name}: {what}: {text}"
        )

    close(torch.stack([rank["losses"] for rank in ranks]).mean(0), alone["losses"], "losses")
    for rank in ranks:
        for step_, (own, expected) in enumerate(zip(rank["gradients"], alone["gradients"], strict=True)):
            for index, (actual, wanted) in enumerate(zip(own, expected, strict=True)):
                close(actual, wanted, f"gradient {index} of step {step_}")
        close(torch.tensor(rank["norms"]), torch.tensor(alone["norms"]), "norms before clipping")
        assert rank["parameters"].keys() == alone["parameters"].keys()
        for key, expected in alone["parameters"].items():
            close(rank["parameters"][key], expected, key)
        assert rank["scale"] == alone["scale"]


def test_a_missing_reduction_would_be_seen(alone) -> None:
    ranks = run_processes(train_all, 2, parallel=False, timeout_seconds=300)
    for name, (_, dtype) in RECIPES.items():
        with pytest.raises(AssertionError, match=re.escape(name)):
            compare([rank[name] for rank in ranks], alone[name], dtype, name)


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_moves_by_many_tolerances(name, alone) -> None:
    losses, tolerance = alone[name]["losses"], TOLERANCES[RECIPES[name][1]]
    moved = abs(losses[-1] - losses[0])
    assert moved > 10 * (tolerance.atol + tolerance.rtol * losses.max())
