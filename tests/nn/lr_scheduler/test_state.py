# pyright: reportArgumentType=false
"""A schedule that is saved half-way and loaded goes on exactly as if nothing had happened."""

import io
from typing import Any

import numpy as np
import pytest
import torch

from colossal._src.nn.lr_scheduler.schedule import Schedule
from colossal.errors import ConfigError
from colossal.nn import lr_scheduler

BUILDERS = {
    "CosineAnnealingLR": {"eta_min": 0.01},
    "CosineAnnealingWarmupLR": {"warmup_steps": 5},
    "FlatAnnealingLR": {},
    "FlatAnnealingWarmupLR": {"warmup_steps": 5},
    "LinearWarmupLR": {"warmup_steps": 5},
    "MultiStepLR": {"milestones": [3, 9]},
    "MultiStepWarmupLR": {"warmup_steps": 5, "milestones": [6, 15]},
    "OneCycleLR": {},
    "PolynomialLR": {"power": 2.0},
    "PolynomialWarmupLR": {"warmup_steps": 5},
    "LambdaLR": {"lr_lambda": lambda k: 1 / (1 + k)},
    "MultiplicativeLR": {"lr_lambda": lambda k: 1 - 0.5 / (1 + k)},
    "StepLR": {"step_size": 4},
    "ExponentialLR": {"gamma": 0.9},
}
TOTAL = 20


def optimizer_of(rates: tuple[float, ...] = (0.8, 0.3)) -> torch.optim.Optimizer:
    groups = [{"params": list(torch.nn.Linear(2, 2).parameters()), "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, momentum=0.9)


def build(name: str, optimizer: torch.optim.Optimizer | None = None, total: int = TOTAL, **changes: Any) -> Schedule:
    return getattr(lr_scheduler, name)(optimizer or optimizer_of(), total, **{**BUILDERS[name], **changes})


def advance(schedule: Schedule, steps: int) -> list[list[tuple[float, float]]]:
    """The rate and momentum of every group after each of the steps."""
    seen = []
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        seen.append([(group["lr"], group["momentum"]) for group in schedule.optimizer.param_groups])
    return seen


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def only_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and only_plain(entry) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return all(only_plain(entry) for entry in value)
    return isinstance(value, (int, float, str))


def test_every_public_schedule_is_covered() -> None:
    assert set(BUILDERS) == set(lr_scheduler.__all__)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("done", [0, 3, 8, TOTAL, TOTAL + 2])
def test_goes_on_identically_after_a_round_trip(name: str, done: int) -> None:
    unbroken = build(name)
    advance(unbroken, done)
    state = unbroken.state_dict()
    assert only_plain(state)
    resumed = build(name)
    resumed.load_state_dict(through_a_file(state))
    assert resumed.last_epoch == unbroken.last_epoch
    assert resumed.get_last_lr() == unbroken.get_last_lr()
    groups = zip(resumed.optimizer.param_groups, unbroken.optimizer.param_groups, strict=True)
    assert all(mine["lr"] == other["lr"] and mine["momentum"] == other["momentum"] for mine, other in groups)
    assert advance(resumed, TOTAL) == advance(unbroken, TOTAL)


@pytest.mark.parametrize("name", BUILDERS)
def test_last_epoch_resumes_on_an_optimizer_that_was_scheduled(name: str) -> None:
    unbroken = build(name)
    advance(unbroken, 7)
    optimizer = optimizer_of()
    optimizer.load_state_dict(unbroken.optimizer.state_dict())
    resumed = build(name, optimizer, last_epoch=6)
    assert resumed.get_last_lr() == pytest.approx(unbroken.get_last_lr(), rel=1e-12)
    assert advance(resumed, 5) == advance(unbroken, 5)


NUMPY = {
    "CosineAnnealingLR": "eta_min",
    "FlatAnnealingLR": "pct_start",
    "PolynomialLR": "end_lr",
    "StepLR": "gamma",
    "OneCycleLR": "max_momentum",
}


@pytest.mark.parametrize("name", NUMPY)
def test_numbers_of_numpy_become_plain_ones_in_the_state(name: str) -> None:
    saved = build(name, optimizer_of((np.float64(0.5), 0.3)), **{NUMPY[name]: np.float64(0.25)})
    state = through_a_file(saved.state_dict())  # weights_only refuses the classes of numpy
    resumed = build(name)
    resumed.load_state_dict(state)
    assert advance(resumed, 3) == advance(saved, 3)


def test_the_saved_numbers_replace_those_of_the_constructor() -> None:
    saved = build("CosineAnnealingWarmupLR", total=40, warmup_steps=11, eta_min=0.2)
    advance(saved, 4)
    loaded = build("CosineAnnealingWarmupLR", optimizer_of((0.5, 0.5)))
    loaded.load_state_dict(saved.state_dict())
    assert loaded.total_steps == 40
    assert advance(loaded, 40) == advance(saved, 40)


def test_a_resumed_product_does_not_call_the_function_for_the_past() -> None:
    saved = build("MultiplicativeLR")
    advance(saved, 6)
    calls = []
    resumed = build("MultiplicativeLR", lr_lambda=lambda k: calls.append(k) or 1.0)
    resumed.load_state_dict(saved.state_dict())
    advance(resumed, 2)
    assert sorted(set(calls)) == [7, 8]


@pytest.mark.parametrize(
    ("saved", "into"),
    [
        (build("CosineAnnealingLR"), build("StepLR")),
        (build("CosineAnnealingLR"), build("CosineAnnealingWarmupLR")),
        (build("StepLR", optimizer_of((0.1,))), build("StepLR")),
    ],
    ids=["another class", "another composition", "another number of groups"],
)
def test_refuses_the_state_of_another_schedule(saved: Schedule, into: Schedule) -> None:
    before = into.state_dict()
    with pytest.raises(ConfigError, match="Build the same schedule"):
        into.load_state_dict(saved.state_dict())
    assert into.state_dict() == before


def test_refuses_the_state_of_a_pytorch_schedule() -> None:
    state = torch.optim.lr_scheduler.StepLR(optimizer_of(), 3).state_dict()
    with pytest.raises(ConfigError, match="StepLR"):
        build("StepLR").load_state_dict(state)
