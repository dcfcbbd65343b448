"""Where norms and means of squares are at their limits: nothing there, nothing moves, too much."""

import pytest
import torch
from optimizers import CASES
from torch import nn

from colossal.nn.optimizer import Adafactor, FusedLAMB, Lamb, Lars

LAYERWISE = {
    "Lamb": lambda params: Lamb(params, lr=0.1, eps=0.0, bias_correction=True),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.1, eps=0.0, weight_decay=0.0, use_nvlamb=True),
}


@pytest.mark.parametrize("name", LAYERWISE)
def test_parameters_of_zeros_move_as_by_adam(name) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = LAYERWISE[name]([weight])
    weight.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.tensor([-0.1, 0.1, -0.1]))


@pytest.mark.parametrize(("name", "factor"), [("Lamb", 10 / 50), ("FusedLAMB", 1.0)])
def test_lamb_limits_the_norm_of_a_parameter(name, factor) -> None:
    weight = nn.Parameter(torch.tensor([30.0, 40.0]))
    optimizer = LAYERWISE[name]([weight])
    weight.grad = torch.tensor([1.0, 1.0])
    optimizer.step()
    moved = torch.tensor([30.0, 40.0]) - weight.data
    assert moved.norm().item() == pytest.approx(0.1 * 50 * factor, rel=1e-5)


def test_lars_without_a_norm_is_plain() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Lars([weight], lr=0.5)
    weight.grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.tensor([-0.5, 0.5]))
    weight.grad = torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.tensor([-0.5, 0.5]))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_zeros_leave_numbers(name) -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((), (3,), (4, 5), (2, 2, 3))]
    optimizer = CASES[name].build(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("name", CASES)
def test_parameters_without_elements_are_no_trouble(name) -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((0,), (0, 5), (4, 0), (2, 2))]
    optimizer = CASES[name].build(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert (params[-1] < 1).all()
    assert params[-1].isfinite().all()


def test_an_update_is_limited_where_gradients_jump() -> None:
    """The means of squares still remember small gradients, so that the quotient would be large."""
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64) + 1e-3)
    optimizer = Adafactor([weight], lr=1.0, relative_step=False, scale_parameter=False)
    for size in (1e-6, 1e-6, 1e-6, 1e3):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
    torch.testing.assert_close(before - weight.detach(), torch.ones_like(before))


@pytest.mark.parametrize(("scales", "moved"), [(True, 1e-2 * 1e-3), (False, 1e-2)])
def test_adafactor_moves_what_is_zero(scales, moved) -> None:
    weight = nn.Parameter(torch.zeros(3, 4))
    optimizer = Adafactor([weight], scale_parameter=scales)
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.full((3, 4), -moved))


def test_the_common_norm_counts_all_parameters() -> None:
    """Two parameters whose gradients are within the limit alone are scaled down if they are not together."""
    alone, pair = [nn.Parameter(torch.ones(1))], [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for params in (alone, pair):
        optimizer = FusedLAMB(params, max_grad_norm=1.0)
        for param in params:
            param.grad = torch.full((1,), 0.9)
        optimizer.step()
        share = optimizer.state[params[0]]["exp_avg"].item() / 0.1 / 0.9
        assert share == pytest.approx(1.0 if len(params) == 1 else 1 / (0.9 * 2**0.5), rel=1e-5)
