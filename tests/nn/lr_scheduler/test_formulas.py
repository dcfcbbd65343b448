# pyright: reportAttributeAccessIssue=false
"""Every schedule equals, at every step, a formula written here from its definition alone."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from colossal.nn import lr_scheduler
from colossal.nn.lr_scheduler import OneCycleLR

Formula = Callable[[float, int], float]
BASES = (0.8, 0.3)
EXACT = 1e-12  # the same formula in another order of float64 operations


def two_groups(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    layers = [torch.nn.Linear(2, 2) for _ in BASES]
    groups = [{"params": list(layer.parameters()), "lr": base} for layer, base in zip(layers, BASES, strict=True)]
    return kind(groups, **options)


def walk(schedule: LRScheduler, steps: int) -> list[list[Any]]:
    """The rates of all groups at the steps 0 to `steps`."""
    rates = [schedule.get_last_lr()]
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        rates.append([group["lr"] for group in schedule.optimizer.param_groups])
        assert rates[-1] == schedule.get_last_lr()
    return rates


def warm(warmup: int, curve: Formula) -> Formula:
    return lambda b, k: b * (k + 1) / (warmup + 1) if k < warmup else curve(b, k)


def half_cosine(b: float, low: float, done: float) -> float:
    return low + 0.5 * (b - low) * (1 + math.cos(math.pi * done))


def one_cycle(b: float, k: int) -> float:
    """30 steps, a third of them (up to step 9) upwards, linear, div 10, final div 100."""
    if k <= 9:
        return b / 10 + (b - b / 10) * k / 9
    return b + (b / 1000 - b) * min(k - 9, 20) / 20


# name -> (arguments, formula of base rate and step); every schedule runs for 30 steps
FORMULAS = {
    "CosineAnnealingLR": ({"eta_min": 0.05}, lambda b, k: half_cosine(b, 0.05, k / 30)),
    "CosineAnnealingWarmupLR": (
        {"warmup_steps": 7, "eta_min": 0.1},
        warm(7, lambda b, k: half_cosine(b, 0.1, (k - 7) / 23)),
    ),
    "FlatAnnealingLR": ({"pct_start": 0.72}, lambda b, k: b if k < 21 else half_cosine(b, 0, (k - 21) / 9)),
    "FlatAnnealingWarmupLR": (
        {"warmup_steps": 4, "pct_start": 0.5, "eta_min": 0.02},
        warm(4, lambda b, k: b if k < 17 else half_cosine(b, 0.02, (k - 17) / 13)),
    ),
    "LinearWarmupLR": ({"warmup_steps": 5}, warm(5, lambda b, k: b * (30 - k) / 25)),
    "MultiStepLR": (
        {"milestones": [3, 10, 10, 28], "gamma": 0.5},
        lambda b, k: b * 0.5 ** ((k >= 3) + 2 * (k >= 10) + (k >= 28)),
    ),
    "MultiStepWarmupLR": (
        {"warmup_steps": 6, "milestones": [6, 12, 99], "gamma": 0.2},
        warm(6, lambda b, k: b * 0.2 ** (1 + (k >= 12))),
    ),
    "OneCycleLR": (
        {"pct_start": 1 / 3, "anneal_strategy": "linear", "div_factor": 10.0, "final_div_factor": 100.0},
        one_cycle,
    ),
    "PolynomialLR": ({"end_lr": 0.01, "power": 2.0}, lambda b, k: 0.01 + (b - 0.01) * ((30 - k) / 30) ** 2),
    "PolynomialWarmupLR": (
        {"warmup_steps": 10, "power": 0.9},
        warm(10, lambda b, k: 1e-4 + (b - 1e-4) * ((30 - k) / 20) ** 0.9),
    ),
    "LambdaLR": ({"lr_lambda": lambda k: 1 / (1 + k)}, lambda b, k: b / (1 + k)),
    "MultiplicativeLR": ({"lr_lambda": lambda k: k / (k + 1)}, lambda b, k: b / (k + 1)),
    "StepLR": ({"step_size": 4, "gamma": 0.7}, lambda b, k: b * 0.7 ** (k // 4)),
    "ExponentialLR": ({"gamma": 0.9}, lambda b, k: b * 0.9**k),
}


def test_every_public_schedule_has_a_formula() -> None:
    assert set(FORMULAS) == set(lr_scheduler.__all__)


@pytest.mark.parametrize("name", FORMULAS)
def test_equals_its_formula_at_every_step_and_holds_the_end(name: str) -> None:
    arguments, formula = FORMULAS[name]
    schedule = getattr(lr_scheduler, name)(two_groups(momentum=0.9), 30, **arguments)
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert schedule.total_steps == 30
    for step, rates in enumerate(walk(schedule, 35)):
        expected = [formula(base, min(step, 30)) for base in BASES]
        assert rates == pytest.approx(expected, rel=EXACT, abs=EXACT), f"step {step}"


# name -> (our arguments, PyTorch's arguments, steps on which both are defined)
TWINS = {
    "CosineAnnealingLR": ({"eta_min": 0.01}, {"T_max": 20, "eta_min": 0.01}, 20),
    "MultiStepLR": ({"milestones": [2, 9]}, {"milestones": [2, 9]}, 20),
    "StepLR": ({"step_size": 3, "gamma": 0.6}, {"step_size": 3, "gamma": 0.6}, 20),
    "ExponentialLR": ({"gamma": 0.8}, {"gamma": 0.8}, 20),
    "PolynomialLR": ({"end_lr": 0.0, "power": 1.7}, {"total_iters": 20, "power": 1.7}, 25),
    "LambdaLR": (
        {"lr_lambda": [lambda k: 0.95**k, lambda k: 1 + k]},
        {"lr_lambda": [lambda k: 0.95**k, lambda k: 1 + k]},
        20,
    ),
    "MultiplicativeLR": ({"lr_lambda": lambda k: 1 - 1 / (k + 3)}, {"lr_lambda": lambda k: 1 - 1 / (k + 3)}, 20),
}


@pytest.mark.parametrize("name", TWINS)
def test_equals_the_pytorch_schedule_of_the_same_name(name: str) -> None:
    ours, theirs, steps = TWINS[name]
    schedule = getattr(lr_scheduler, name)(two_groups(), 20, **ours)
    twin = getattr(torch.optim.lr_scheduler, name)(two_groups(), **theirs)
    for mine, other in zip(walk(schedule, steps), walk(twin, steps), strict=True):
        assert mine == pytest.approx(other, rel=1e-9, abs=1e-12)  # PyTorch multiplies step by step, which rounds


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize(("kind", "options"), [(torch.optim.SGD, {"momentum": 0.5}), (torch.optim.AdamW, {})])
@pytest.mark.parametrize("cycle", [True, False])
@pytest.mark.parametrize(("total", "pct"), [(20, 0.3), (7, 0.5), (3, 0.2)])
def test_one_cycle_equals_pytorch_in_rate_and_momentum(
    strategy: str, kind: type[torch.optim.Optimizer], options: Any, cycle: bool, total: int, pct: float
) -> None:
    shared = {"pct_start": pct, "anneal_strategy": strategy, "cycle_momentum": cycle}
    shared |= {"base_momentum": [0.8, 0.7], "max_momentum": 0.9, "div_factor": 20.0, "final_div_factor": 50.0}
    schedule = OneCycleLR(two_groups(kind, **options), total, **shared)
    twin = torch.optim.lr_scheduler.OneCycleLR(two_groups(kind, **options), list(BASES), total, **shared)

    def state(optimizer: torch.optim.Optimizer) -> list[tuple[float, ...]]:
        return [(g["lr"], *g.get("betas", (g.get("momentum"),))) for g in optimizer.param_groups]

    for step in range(total):
        for mine, other in zip(state(schedule.optimizer), state(twin.optimizer), strict=True):
            assert mine == pytest.approx(other, rel=EXACT, abs=EXACT), f"step {step}"
        for each in (schedule, twin):
            each.optimizer.step()
            if step < total - 1:
                each.step()


def test_one_cycle_that_has_no_room_to_rise_begins_at_its_peak() -> None:
    # pct_start * total_steps - 1 is exactly 0, where PyTorch divides by zero
    schedule = OneCycleLR(two_groups(momentum=0.9), 4, pct_start=0.25)
    assert schedule.get_last_lr() == pytest.approx(BASES)
    assert [group["momentum"] for group in schedule.optimizer.param_groups] == pytest.approx([0.85, 0.85])


def test_the_multiplicative_function_is_called_once_per_step() -> None:
    calls = []
    schedule = lr_scheduler.MultiplicativeLR(
        two_groups(), 50, lr_lambda=[lambda k: calls.append(k) or 0.9, lambda _: 1]
    )
    walk(schedule, 60)
    assert calls == list(range(1, 51))


def test_a_tensor_rate_is_filled_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=rate, foreach=False)
    schedule = lr_scheduler.LinearWarmupLR(optimizer, 4)
    walk(schedule, 2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.25)
    assert schedule.state_dict()["base_lrs"] == [0.5]


def test_ordinary_use_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(lr_scheduler.CosineAnnealingWarmupLR(two_groups(), 5, warmup_steps=2), 8)
