# pyright: reportArgumentType=false
"""Arguments that cannot work are refused at once, with what was required, what was found and what to do."""

import math
from typing import Any

import pytest
import torch

from colossal._src.nn.lr_scheduler.schedule import Schedule
from colossal.errors import ConfigError
from colossal.nn import lr_scheduler

REQUIRED = {
    "MultiStepLR": {"milestones": [1]},
    "MultiStepWarmupLR": {"milestones": [5]},
    "LambdaLR": {"lr_lambda": lambda _: 1.0},
    "MultiplicativeLR": {"lr_lambda": lambda _: 1.0},
}
WITH_WARMUP = [name for name in lr_scheduler.__all__ if "Warmup" in name]
MAY_BE_ALL_WARM_UP = "LinearWarmupLR"


def optimizer_of(
    groups: int = 2, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any
) -> torch.optim.Optimizer:
    return kind([{"params": list(torch.nn.Linear(2, 2).parameters()), "lr": 0.1} for _ in range(groups)], **options)


def build(
    name: str, optimizer: torch.optim.Optimizer | None = None, total_steps: object = 10, **arguments: Any
) -> Schedule:
    optimizer = optimizer or optimizer_of(momentum=0.9)
    return getattr(lr_scheduler, name)(optimizer, total_steps, **{**REQUIRED.get(name, {}), **arguments})


@pytest.mark.parametrize("name", lr_scheduler.__all__)
@pytest.mark.parametrize("total_steps", [0, -3, 2.5, True, None])
def test_total_steps_must_be_a_positive_integer(name: str, total_steps: object) -> None:
    with pytest.raises(ConfigError, match="total_steps must be an integer of at least 1"):
        build(name, total_steps=total_steps)


@pytest.mark.parametrize("name", WITH_WARMUP)
@pytest.mark.parametrize("warmup_steps", [10, 11, -1, 1.5])
def test_the_warm_up_must_leave_room_for_the_curve(name: str, warmup_steps: object) -> None:
    if name == MAY_BE_ALL_WARM_UP and warmup_steps in (10, 11):
        assert build(name, warmup_steps=warmup_steps).total_steps == warmup_steps
        return
    with pytest.raises(ConfigError, match="warmup_steps must be"):
        build(name, warmup_steps=warmup_steps)


@pytest.mark.parametrize("total_steps", [2, 4])
def test_a_linear_warm_up_beyond_the_last_step_is_a_warm_up_alone(
    total_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = optimizer_of()
    with caplog.at_level("WARNING"):
        schedule = build(MAY_BE_ALL_WARM_UP, optimizer, total_steps, warmup_steps=4)
    assert f"warmup_steps=4 and total_steps={total_steps}" in caplog.text
    rates = [schedule.get_last_lr()[0]]
    for _ in range(6):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates == pytest.approx([0.1 * share for share in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0)])


@pytest.mark.parametrize("name", ["FlatAnnealingLR", "FlatAnnealingWarmupLR", "OneCycleLR"])
@pytest.mark.parametrize("pct_start", [0.0, 1.0, -0.1, 1.1, math.nan, None])
def test_pct_start_lies_between_zero_and_one(name: str, pct_start: object) -> None:
    with pytest.raises(ConfigError, match="pct_start must be a fraction"):
        build(name, pct_start=pct_start)


@pytest.mark.parametrize("name", ["MultiStepLR", "MultiStepWarmupLR"])
@pytest.mark.parametrize(
    ("milestones", "message"),
    [
        (None, "at least one step"),
        ([], "at least one step"),
        ([5, 3], "increasing order"),
        ([-1, 3], "milestone"),
        ([2.5], "milestone"),
    ],
)
def test_milestones_are_steps_in_order(name: str, milestones: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, milestones=milestones)


def test_a_milestone_inside_the_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4"):
        build("MultiStepWarmupLR", warmup_steps=4, milestones=[3, 6])


@pytest.mark.parametrize("name", ["LambdaLR", "MultiplicativeLR"])
@pytest.mark.parametrize("lr_lambda", [None, 0.5, [abs], [abs, abs, abs], [abs, None]])
def test_lr_lambda_is_one_function_or_one_per_group(name: str, lr_lambda: object) -> None:
    with pytest.raises(ConfigError, match="lr_lambda must be"):
        build(name, lr_lambda=lr_lambda)


OUT_OF_RANGE = [
    ("MultiStepLR", "gamma", 0.0),
    ("StepLR", "gamma", -1.0),
    ("StepLR", "step_size", 0),
    ("ExponentialLR", "gamma", math.inf),
    ("PolynomialLR", "power", 0.0),
    ("PolynomialWarmupLR", "power", "1"),
    ("PolynomialLR", "end_lr", -1e-4),
    ("CosineAnnealingLR", "eta_min", -1.0),
    ("OneCycleLR", "div_factor", 0.0),
    ("OneCycleLR", "final_div_factor", -1.0),
    ("OneCycleLR", "base_momentum", 1.0),
    ("OneCycleLR", "max_momentum", -0.1),
    ("OneCycleLR", "max_momentum", [0.9]),
    ("OneCycleLR", "anneal_strategy", "cosine"),
    ("StepLR", "last_epoch", -2),
]


@pytest.mark.parametrize(("name", "argument", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(name: str, argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=argument):
        build(name, **{argument: value})


FINAL = [
    ("CosineAnnealingLR", "eta_min"),
    ("CosineAnnealingWarmupLR", "eta_min"),
    ("FlatAnnealingWarmupLR", "eta_min"),
    ("PolynomialLR", "end_lr"),
    ("PolynomialWarmupLR", "end_lr"),
]


@pytest.mark.parametrize(("name", "argument"), FINAL)
def test_a_decay_never_ends_above_its_base_rate(name: str, argument: str) -> None:
    optimizer = optimizer_of()
    optimizer.param_groups[1]["lr"] = 1e-5
    with pytest.raises(ConfigError, match=rf"{argument}=0.0001 and a base rate of 1e-05 in group 1"):
        build(name, optimizer, **{argument: 1e-4})


def test_one_cycle_needs_a_momentum_to_cycle() -> None:
    optimizer = optimizer_of(kind=torch.optim.Adagrad)
    with pytest.raises(ConfigError, match="cycle_momentum=False"):
        build("OneCycleLR", optimizer)
    assert build("OneCycleLR", optimizer, cycle_momentum=False).total_steps == 10


@pytest.mark.parametrize("name", lr_scheduler.__all__)
def test_only_a_pytorch_optimizer_is_scheduled(name: str) -> None:
    with pytest.raises(ConfigError, match=r"torch\.optim\.Optimizer"):
        build(name, object())


def test_resuming_an_optimizer_that_was_never_scheduled_is_refused() -> None:
    with pytest.raises(ConfigError, match="initial_lr"):
        build("StepLR", last_epoch=3)


@pytest.mark.parametrize("name", lr_scheduler.__all__)
def test_a_refused_schedule_leaves_the_optimizer_alone(name: str) -> None:
    optimizer = optimizer_of(momentum=0.9)
    with pytest.raises(ConfigError):
        build(name, optimizer, total_steps=0)
    assert "initial_lr" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 0.1
