# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Same seed, same data, half precision: N ranks equal one process, and no precision trains to something else.

`test_gold_rule.py` holds what parallelism alone must not change. Here the gradients are those that the optimizer sees:
of float32 masters where there are some.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from digits import digits
from equality import assert_within_rounding
from plugins import plugins
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossal.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossal.logging import get_dist_logger
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.testing import assert_same_on_all_ranks, run_processes

GLOBAL_BATCH, STEPS, LR = 36, 6, 0.5
PLUGINS = plugins("DDP", "FSDP")


@dataclass(frozen=True)
class Recipe:
    """What a training run does besides a plain step."""

    precision: Callable[[], Any]
    dtype: torch.dtype = torch.float16
    accumulate: int = 1
    max_norm: float | None = None
    clip_value: float | None = None
    plugins: tuple[str, ...] = ("DDP",)
    options: dict[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    """A convolution, normalisations, a layer that is used twice, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 4)
        self.first = nn.Linear(256, 32)
        self.norm = nn.LayerNorm(32)
        self.shared = nn.Linear(32, 32)
        self.again = nn.Linear(32, 32)
        self.again.weight = self.shared.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(requires_grad=False)
        self.head = nn.Linear(32, 10)
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, 32))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.group_norm(self.conv(images)))
        x = torch.tanh(self.norm(self.first(x.flatten(1)))) + self.offset
        x = torch.tanh(self.again(torch.tanh(self.shared(x))))
        return self.head(self.frozen(x))


def parts(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(11)
    get_dist_logger().set_level("WARNING")
    images, labels = digits()
    data = TensorDataset(torch.tensor(images, dtype=dtype).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    model = Net().to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.01},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "lr": LR / 2},
    ]
    return model, torch.optim.SGD(groups, lr=LR, momentum=0.5), data


def train(recipe: Recipe, world_size: int, plugin: str | None, exactly: bool = False) -> dict[str, Any]:
    """Train for a few steps on this rank's part of the digits and return what must not depend on the world."""
    precision = None if exactly else recipe.precision()
    booster = Booster(device="cpu", plugin=plugin and PLUGINS[plugin](**recipe.options), mixed_precision=precision)
    model, optimizer, data = parts(torch.float64 if exactly else torch.float32)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=STEPS, warmup_steps=2)
    batch = GLOBAL_BATCH // world_size // recipe.accumulate
    loader = booster.plugin.prepare_dataloader(data, batch, shuffle=True, drop_last=True)
    model, optimizer, criterion, loader, schedule = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), loader, schedule
    )
    batches, losses, gradients, norms = iter(loader), [], [], []
    for _ in range(STEPS):
        losses.append(step(booster, model, optimizer, criterion, batches, recipe.accumulate))
        norms.append(optimizer.get_grad_norm())
        if recipe.max_norm is not None:
            norms.append(optimizer.clip_grad_by_norm(recipe.max_norm).item())
        if recipe.clip_value is not None:
            optimizer.clip_grad_by_value(recipe.clip_value)
        gradients.append([whole(parameter.grad) for parameter in optimizer.parameters])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if plugin:
        for parameter in [*model.parameters(), *optimizer.parameters]:
            assert_same_on_all_ranks(whole(parameter))
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "norms": torch.tensor(norms, dtype=torch.float64),
        "masters": [whole(parameter) for parameter in optimizer.parameters],
        "model": {name: whole(parameter) for name, parameter in model.unwrap().named_parameters()},
        "scale": optimizer.scaler.scale_value,
    }


def step(booster, model, optimizer, criterion, batches, accumulate: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(accumulate):
        images, labels = next(batches)
        if micro < accumulate - 1:
            with booster.no_sync(model):
                loss = criterion(model(images), labels) / accumulate
                booster.backward(loss, optimizer)
        else:
            loss = criterion(model(images), labels) / accumulate
            booster.backward(loss, optimizer)
        total += loss.detach()
    return total


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def naive() -> FP16NaiveMixedPrecision:
    return FP16NaiveMixedPrecision(initial_scale=2.0**8, growth_interval=5)


BOTH: dict[str, Any] = {"plugins": ("DDP", "FSDP")}
# In fp8 a rank's part of the batch rounds like the whole batch; what is left are roundings that flip.
RECIPES = {
    "fp16_naive": Recipe(naive),
    "fp16_naive, accumulation": Recipe(naive, accumulate=2),
    "fp16_naive, both clips": Recipe(naive, max_norm=0.5, clip_value=0.05),
    "fp16_naive, all": Recipe(naive, accumulate=3, max_norm=0.5, clip_value=0.1),
    "fp16_naive, bucket views": Recipe(
        naive, accumulate=2, options={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}
    ),
    "fp8": Recipe(lambda: "fp8", torch.bfloat16, max_norm=0.5, **BOTH),
    "fp8, accumulation, clip": Recipe(
        lambda: "fp8", torch.bfloat16, accumulate=2, max_norm=0.5, clip_value=0.1, **BOTH
    ),
    "fp16, accumulation, clip": Recipe(
        lambda: FP16TorchMixedPrecision(init_scale=2.0**8, growth_interval=5), accumulate=2, max_norm=0.5, **BOTH
    ),
}
NAMES = {plugin: [name for name, recipe in RECIPES.items() if plugin in recipe.plugins] for plugin in PLUGINS}


def train_some(plugin: str | None, names: list[str], exactly: bool = False) -> dict[str, dict[str, Any]]:
    return {name: train(RECIPES[name], dist.get_world_size(), plugin, exactly) for name in names}


@cache
def alone(exactly: bool) -> dict[str, dict[str, Any]]:
    return run_processes(train_some, 1, None, list(RECIPES), exactly)[0]


@cache
def world(plugin: str, size: int) -> list[dict[str, dict[str, Any]]]:
    return run_processes(train_some, size, plugin, NAMES[plugin])


@pytest.mark.parametrize(
    ("plugin", "size", "name"),
    [
        pytest.param(plugin, size, name, marks=() if size == 2 else pytest.mark.slow)
        for plugin in PLUGINS
        for size in (1, 2, 3)
        for name in NAMES[plugin]
    ],
)
def test_any_number_of_ranks_trains_like_one(plugin: str, size: int, name: str) -> None:
    compare([rank[name] for rank in world(plugin, size)], name, f"{name}, {plugin}, {size} ranks")


def compare(ranks: list[dict[str, Any]], name: str, at: str) -> None:
    expected, exact = (tensors(alone(exactly)[name]) for exactly in (False, True))
    losses = torch.stack([rank["losses"] for rank in ranks]).mean(0)
    for rank in ranks:
        found = tensors(rank | {"losses": losses})
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_within_rounding(value, expected[key], exact[key], RECIPES[name].dtype, f"{at}: {key}")
        assert all(master.dtype == torch.float32 for master in rank["masters"])
        assert rank["scale"] == alone(False)[name]["scale"]


def tensors(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything that a run must share with one process."""
    gradients = {
        f"gradient {index} of step {number}": gradient
        for number, step_ in enumerate(run["gradients"])
        for index, gradient in enumerate(step_)
    }
    masters = {f"parameter {index} of the optimizer": master for index, master in enumerate(run["masters"])}
    return {"losses": run["losses"], "norms": run["norms"], **gradients, **masters, **run["model"]}


def test_a_missing_reduction_would_be_seen() -> None:
    ranks = run_processes(train_some, 2, None, list(RECIPES))
    for name in RECIPES:
        with pytest.raises(AssertionError, match=re.escape(name)):
            compare([rank[name] for rank in ranks], name, name)


@pytest.mark.parametrize("name", RECIPES)
def test_it_trains_and_the_scale_grows(name: str) -> None:
    losses, exact = alone(False)[name]["losses"], alone(True)[name]["losses"]
    assert losses[0] - losses[-1] > 4 * (losses - exact).abs().max()
    assert alone(False)[name]["scale"] == (1.0 if name.startswith("fp8") else 2.0 ** (8 + STEPS // 5))


# ------------------------------------------------------------------------------------------ overflows and beginnings


def overflow_on_one_rank(precision: str, bad_rank: int) -> list[tuple[bool, float]]:
    booster = Booster(device="cpu", plugin=TorchDDPPlugin(), mixed_precision=precision)
    model, optimizer, data = parts()
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    seen = []
    for number in range(6):
        images, labels = data[number * 8 : (number + 1) * 8]
        loss = criterion(model(images), labels)
        if number in {1, 2, 4} and dist.get_rank() == bad_rank:
            loss = loss * torch.inf
        before = [parameter.detach().clone() for parameter in model.parameters()]
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        moved = any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        assert moved != optimizer.scaler.skipped
        for parameter in [*model.parameters(), *optimizer.parameters]:
            assert_same_on_all_ranks(parameter.detach())
            assert parameter.isfinite().all()
        seen.append((optimizer.scaler.skipped, optimizer.scaler.scale_value))
    return seen


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(("precision", "hysteresis"), [("fp16", 1), ("fp16_naive", 2)])
def test_an_overflow_on_one_rank_drops_the_step_on_all(precision, hysteresis, bad_rank) -> None:
    scale, expected, overflows = 2.0**16, [], 0
    for number in range(6):
        overflows += number in {1, 2, 4}
        scale /= 2 if number in {1, 2, 4} and overflows >= hysteresis else 1
        expected.append((number in {1, 2, 4}, scale))
    assert run_processes(overflow_on_one_rank, 2, precision, bad_rank) == [expected] * 2


def begin_apart() -> list[torch.Tensor]:
    booster = Booster(device="cpu", plugin=TorchDDPPlugin(), mixed_precision="fp16_naive")
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 2)
    first = model.weight.detach().clone()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=2.0**-12))
    for _ in range(3):
        booster.backward(model(torch.ones(4, 8)).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in [*model.parameters(), *optimizer.parameters]:
        assert_same_on_all_ranks(parameter.detach())
    return [first, optimizer.parameters[0].detach()]


def test_all_ranks_begin_with_the_masters_of_the_first() -> None:
    (first, trained), (other, _) = run_processes(begin_apart, 2)
    assert not torch.equal(first, other)
    torch.testing.assert_close(trained, first - 3 * 2.0**-13, rtol=0, atol=1e-7)  # nothing is rounded to float16


def overflow_in_one_shard() -> list[tuple[bool, float]]:
    booster = Booster(device="cpu", plugin=TorchFSDPPlugin(), mixed_precision="fp16")
    model, optimizer, data = parts()
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    seen = []
    for number in range(3):
        images, labels = data[number * 8 : (number + 1) * 8]
        before = [parameter.to_local().clone() for parameter in optimizer.parameters]
        booster.backward(criterion(model(images), labels), optimizer)
        if number == 1 and dist.get_rank() == 1:
            optimizer.parameters[0].grad.to_local().view(-1)[0] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
        after = [parameter.to_local() for parameter in optimizer.parameters]
        moved = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert moved != optimizer.scaler.skipped
        seen.append((optimizer.scaler.skipped, optimizer.scaler.scale_value))
    return seen


def test_an_overflow_in_the_shard_of_one_rank_drops_the_step_on_all() -> None:
    expected = [(False, 2.0**16), (True, 2.0**15), (False, 2.0**15)]
    assert run_processes(overflow_in_one_shard, 2) == [expected] * 2
