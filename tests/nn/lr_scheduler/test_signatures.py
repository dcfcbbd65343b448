"""The documented names and defaults of the arguments."""

import inspect

import pytest

from colossal.nn import lr_scheduler

DOCUMENTED = {
    "CosineAnnealingLR": {"eta_min": 0},
    "CosineAnnealingWarmupLR": {"warmup_steps": 0, "eta_min": 0.0},
    "FlatAnnealingLR": {"pct_start": 0.72},
    "FlatAnnealingWarmupLR": {"warmup_steps": 0, "pct_start": 0.72, "eta_min": 0},
    "LinearWarmupLR": {"warmup_steps": 0},
    "MultiStepLR": {"milestones": None, "gamma": 0.1},
    "MultiStepWarmupLR": {"warmup_steps": 0, "milestones": None, "gamma": 0.1},
    "OneCycleLR": {
        "pct_start": 0.3,
        "anneal_strategy": "cos",
        "cycle_momentum": True,
        "base_momentum": 0.85,
        "max_momentum": 0.95,
        "div_factor": 25.0,
        "final_div_factor": 1e4,
    },
    "PolynomialLR": {"end_lr": 1e-4, "power": 1.0},
    "PolynomialWarmupLR": {"warmup_steps": 0, "end_lr": 1e-4, "power": 1.0},
    "LambdaLR": {"lr_lambda": None},
    "MultiplicativeLR": {"lr_lambda": None},
    "StepLR": {"step_size": 1, "gamma": 0.1},
    "ExponentialLR": {"gamma": 1.0},
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_takes_the_documented_arguments_in_order(name: str) -> None:
    parameters = inspect.signature(getattr(lr_scheduler, name)).parameters
    expected = {"optimizer": inspect.Parameter.empty, "total_steps": inspect.Parameter.empty}
    expected |= {**DOCUMENTED[name], "last_epoch": -1}
    assert {key: parameter.default for key, parameter in parameters.items()} == expected
    assert list(parameters) == list(expected)


def test_nothing_documented_is_missing() -> None:
    assert set(DOCUMENTED) == set(lr_scheduler.__all__)
