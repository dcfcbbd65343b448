import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.amp import Autocast, DynamicScaler, LossScaler, NoScaler, ScalerConfig
from colossal.errors import ConfigError
from colossal.interface import ModelWrapper, OptimizerWrapper
from colossal.nn.optimizer import HybridAdam

SCALE = 2.0**12


def scalers() -> list:
    return [NoScaler(), DynamicScaler(ScalerConfig(init_scale=SCALE, growth_interval=2), "cpu")]


def build(scaler, lr: float = 0.5) -> tuple[nn.Linear, OptimizerWrapper]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=lr), scaler)


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return factor * (model(torch.arange(8.0).view(2, 4)) ** 2).sum()


@pytest.fixture(params=scalers(), ids=["no scaler", "scaled"])
def scaler(request) -> LossScaler:
    return copy.deepcopy(request.param)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_by_norm_equals_torchs_on_true_gradients(scaler, norm_type) -> None:
    model, optimizer = build(scaler)
    twin = copy.deepcopy(model)
    loss_of(twin).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.3, norm_type)
    optimizer.backward(loss_of(model))
    assert optimizer.get_grad_norm(norm_type) == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(optimizer.clip_grad_by_norm(0.3, norm_type), expected)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert optimizer.get_grad_norm(norm_type) == pytest.approx(0.3, rel=1e-4)


def test_gradients_below_the_limit_stay_as_they_are(scaler) -> None:
    model, optimizer = build(scaler)
    optimizer.backward(loss_of(model))
    optimizer.unscale_grad()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = optimizer.clip_grad_by_norm(1e6)
    after = [p.grad for p in model.parameters()]
    assert all(now is not None and torch.equal(now, grad) for now, grad in zip(after, before, strict=True))
    assert norm < 1e6


def test_clipping_by_value_equals_torchs_on_true_gradients(scaler) -> None:
    model, optimizer = build(scaler)
    twin = copy.deepcopy(model)
    loss_of(twin).backward()
    nn.utils.clip_grad_value_(twin.parameters(), 0.7)
    optimizer.backward(loss_of(model))
    optimizer.clip_grad_by_value(0.7)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_step_after_both_clips_equals_torchs(scaler) -> None:
    model, optimizer = build(scaler)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(4):
        loss_of(twin).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        nn.utils.clip_grad_value_(twin.parameters(), 0.2)
        other.step()
        other.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.clip_grad_by_norm(1.0)
        optimizer.clip_grad_by_value(0.2)
        optimizer.step()
        optimizer.zero_grad()
        for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own, expected)


def test_an_infinite_norm_can_be_an_error(scaler) -> None:
    model, optimizer = build(scaler)
    optimizer.backward(loss_of(model, float("inf")))
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)


def test_an_overflow_drops_the_step_and_halves_the_scale() -> None:
    model, optimizer = build(scalers()[1])
    before = copy.deepcopy(model.state_dict())
    optimizer.backward(loss_of(model, 1e38))
    optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step() is None
    assert optimizer.scaler.skipped
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.scaler.scale_value == SCALE / 2
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(loss_of(model, 1e-3))
        optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.scaler.skipped
    assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.scaler.scale_value == SCALE


def test_a_schedule_goes_on_after_a_first_step_that_was_dropped() -> None:
    model, optimizer = build(scalers()[1])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.unwrap(), 1)
    optimizer.backward(loss_of(model, 1e38))
    optimizer.step()
    schedule.step()
    assert optimizer.scaler.skipped
    assert schedule.get_last_lr() == [pytest.approx(0.05)]


def test_gradients_that_are_thrown_away_can_be_followed_by_new_ones(scaler) -> None:
    model, optimizer = build(scaler)
    optimizer.backward(loss_of(model))
    expected = optimizer.get_grad_norm()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert optimizer.get_grad_norm() == pytest.approx(expected)


def test_scaled_gradients_are_not_added_to_unscaled_ones() -> None:
    model, optimizer = build(scalers()[1])
    optimizer.backward(loss_of(model))
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(ConfigError, match=r"Call step\(\) or zero_grad\(\) first"):
        optimizer.backward(loss_of(model))


def test_backward_by_a_known_gradient(scaler) -> None:
    model, optimizer = build(scaler)
    inputs = torch.ones(2, 4)
    output = model(inputs)
    optimizer.backward_by_grad(output, optimizer.scale_loss(torch.ones(2, 3)))
    optimizer.unscale_grad()
    torch.testing.assert_close(model.weight.grad, torch.full((3, 4), 2.0))


def test_backward_into_chosen_inputs_and_twice(scaler) -> None:
    model, optimizer = build(scaler)
    loss = loss_of(model)
    optimizer.backward(loss, inputs=[model.bias], retain_graph=True)
    assert model.weight.grad is None
    optimizer.backward(loss)
    assert model.weight.grad is not None


def test_a_closure_reaches_an_optimizer_that_needs_it() -> None:
    model = nn.Linear(4, 3)
    optimizer = OptimizerWrapper(torch.optim.LBFGS(model.parameters()))

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.backward(loss)
        return loss.item()

    first = optimizer.step(closure)
    assert closure() < first


def test_the_wrapped_optimizer_shows_through() -> None:
    model, optimizer = build(NoScaler())
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra], "lr": 9.0})
    assert optimizer.parameters == [*model.parameters(), extra]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 9.0]
    assert optimizer.defaults["lr"] == 0.5
    state = optimizer.state_dict()
    state["param_groups"][1]["lr"] = 1.0
    optimizer.load_state_dict(state)
    assert optimizer.unwrap().param_groups[1]["lr"] == 1.0
    assert not optimizer.state


def test_a_scaler_state_round_trips_and_may_be_missing() -> None:
    _, scaled = scalers()
    scaled.load_state_dict(scaled.state_dict() | {"scale": 8.0})
    assert scaled.scale_value == 8.0
    scaled.load_state_dict(NoScaler().state_dict())
    NoScaler().load_state_dict(scaled.state_dict())
    assert scaled.scale_value == 8.0


@pytest.mark.parametrize(
    "options", [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}]
)
def test_a_rule_that_cannot_work_is_refused(options) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"Found {name}="):
        ScalerConfig(**options)


def test_autocast_takes_half_precisions_only() -> None:
    with pytest.raises(ConfigError, match=r"Found torch\.float64"):
        Autocast("cpu", torch.float64)


def test_unwrapping_finds_the_users_model() -> None:
    model = nn.Linear(1, 1)
    assert ModelWrapper(ModelWrapper(model)).unwrap() is model


@pytest.mark.parametrize(("scale", "max_norm"), [(None, 0.5), (None, 1e2), (1024.0, 0.0), (1024.0, 0.5), (1024.0, 1e2)])
def test_unscaling_and_clipping_in_the_pass_of_the_update(scale: float | None, max_norm: float) -> None:
    """Nothing writes to the gradients: they are what the backward pass left, and the step is that of clipped ones."""
    start, rows = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(0, 2, 8).view(2, 4)
    expected = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([expected], lr=0.1, eps=1e-3, weight_decay=0.0)
    weight = torch.nn.Parameter(start.clone())
    scaler = None if scale is None else DynamicScaler(ScalerConfig(init_scale=scale), "cpu")
    optimizer = OptimizerWrapper(HybridAdam([weight], lr=0.1, eps=1e-3), scaler, max_norm=max_norm)
    for _ in range(3):
        reference.zero_grad()
        (torch.nn.functional.linear(rows, expected) ** 2).sum().backward()
        plain = expected.grad.clone()
        if max_norm:
            torch.nn.utils.clip_grad_norm_([expected], max_norm)
        reference.step()
        optimizer.zero_grad()
        optimizer.backward((torch.nn.functional.linear(rows, weight) ** 2).sum())
        optimizer.step()
        torch.testing.assert_close(weight.grad, plain * (scale or 1.0), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(weight.detach(), expected.detach(), rtol=1e-6, atol=1e-6)


def test_an_overflow_is_found_by_the_norm() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    scaler = DynamicScaler(ScalerConfig(init_scale=8.0), "cpu")
    optimizer = OptimizerWrapper(HybridAdam([weight], lr=0.1), scaler)
    optimizer.backward((weight * torch.tensor([1.0, float("inf")])).sum())
    optimizer.step()
    assert scaler.skipped
    assert scaler.scale_value == 4.0
    assert weight.tolist() == [1.0, 1.0]


# -------------------------------------------------------------------------------------- a loss that was not scaled


ACTIONS: dict[str, Callable[[OptimizerWrapper], object]] = {
    "step": lambda optimizer: optimizer.step(),
    "clip by norm": lambda optimizer: optimizer.clip_grad_by_norm(1.0),
    "clip by value": lambda optimizer: optimizer.clip_grad_by_value(1.0),
    "norm": lambda optimizer: optimizer.get_grad_norm(),
}


@pytest.mark.parametrize("kind", [torch.optim.SGD, HybridAdam])
@pytest.mark.parametrize("action", ACTIONS)
def test_gradients_of_a_loss_that_was_not_scaled_are_refused(action: str, kind: Callable[..., Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = OptimizerWrapper(kind([weight], lr=0.1), DynamicScaler(ScalerConfig(init_scale=8.0), "cpu"))
    for _ in range(2):
        weight.sum().backward()
        with pytest.raises(
            ConfigError, match=r"multiplies the loss by 8\. .*Call booster\.backward\(loss, optimizer\)"
        ):
            ACTIONS[action](optimizer)
        optimizer.zero_grad()
        assert weight.tolist() == [1.0, 1.0]
    optimizer.backward(weight.sum())
    ACTIONS[action](optimizer)
    if action != "step":
        optimizer.step()
    assert weight.tolist() != [1.0, 1.0]
    with pytest.raises(ConfigError, match="since the last step"):
        optimizer.step()  # would divide the same gradients again


def test_a_loss_may_be_scaled_by_hand() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = OptimizerWrapper(torch.optim.SGD([weight], lr=0.1), DynamicScaler(ScalerConfig(init_scale=8.0), "cpu"))
    optimizer.scale_loss(weight.sum()).backward()
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 0.9])


def test_a_step_without_gradients_is_no_mistake() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    OptimizerWrapper(torch.optim.SGD([weight], lr=0.1), DynamicScaler(ScalerConfig(init_scale=8.0), "cpu")).step()


def test_an_attribute_of_the_plain_optimizer_is_found_behind_unwrap() -> None:
    plain: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.25)
    plain.color = "red"
    optimizer: Any = OptimizerWrapper(plain)
    with pytest.raises(AttributeError, match=r"use optimizer\.unwrap\(\)\.color$"):
        optimizer.color  # noqa: B018
    with pytest.raises(AttributeError, match="'OptimizerWrapper' object has no attribute 'nothing'$"):
        optimizer.nothing  # noqa: B018


def test_an_optimizer_is_shown_with_its_hyperparameters() -> None:
    shown = repr(OptimizerWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.25)))
    assert shown.startswith("OptimizerWrapper(SGD (")
    assert "lr: 0.25" in shown


class CountsCalls(torch.optim.SGD):
    num_calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_calls += 1
        super().zero_grad(set_to_none)


def test_gradients_are_discarded_by_a_method_of_the_optimizer_if_it_has_one() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    inner = CountsCalls([weight], lr=1.0)
    optimizer = OptimizerWrapper(inner)
    for number, set_to_none in enumerate([True, False], start=1):
        optimizer.backward(weight.sum())
        optimizer.zero_grad(set_to_none)
        assert inner.num_calls == number
        assert weight.grad is None if set_to_none else weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_freed_or_filled_with_zeros(set_to_none: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = OptimizerWrapper(torch.optim.SGD([weight], lr=1.0))
    optimizer.backward(weight.sum())
    optimizer.zero_grad(set_to_none)
    assert weight.grad is None if set_to_none else weight.grad is not None and not weight.grad.any()


def test_a_profiler_sees_that_gradients_are_discarded() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = OptimizerWrapper(torch.optim.SGD([weight], lr=1.0))
    optimizer.backward(weight.sum())
    with torch.profiler.profile() as profile:
        optimizer.zero_grad()
    assert weight.grad is None
    assert "Optimizer.zero_grad#SGD.zero_grad" in [event.key for event in profile.key_averages()]


def test_the_norm_of_clipping_can_change_between_steps() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = OptimizerWrapper(torch.optim.SGD([weight], lr=1.0), max_norm=5.0)
    moved = []
    for max_norm in (None, 1.0, 0.0):
        if max_norm is not None:
            optimizer.max_norm = max_norm
        before = weight.detach().clone()
        optimizer.backward((weight * torch.tensor([6.0, 8.0], dtype=torch.float64)).sum())
        optimizer.step()
        optimizer.zero_grad()
        moved.append((weight.detach() - before).norm().item())
    assert moved == pytest.approx([5.0, 1.0, 10.0], rel=1e-5)
    with pytest.raises(ConfigError, match="at least 0.*Found max_norm=-1"):
        optimizer.max_norm = -1.0
    assert optimizer.max_norm == 0.0
