"""The older modes of mixed precision: each is the precision of a `Booster` under the documented defaults."""

import copy
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossal.errors import ConfigError, UnsupportedError
from colossal.legacy.amp import (
    AMP_TYPE,
    BF16MixedPrecisionMixin,
    FP16MixedPrecisionMixin,
    MixedPrecisionOptimizer,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
    mixed_precision_from,
)
from colossal.testing import run_threads


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)


def train(model: Any, optimizer: Any, criterion: Any, clip: Any) -> list[torch.Tensor]:
    inputs, labels = make_batch()
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(criterion(model(inputs), labels))
        clip(model, optimizer)
        optimizer.step()
    return [parameter.detach().clone() for parameter in optimizer.parameters]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


# ------------------------------------------------------------------------------------------ the modes


@pytest.mark.parametrize(
    ("mode", "options", "precision"),
    [
        (AMP_TYPE.TORCH, {}, FP16TorchMixedPrecision()),
        (AMP_TYPE.TORCH, {"init_scale": 2.0**8, "growth_interval": 1}, FP16TorchMixedPrecision(2.0**8, 2.0, 0.5, 1)),
        (AMP_TYPE.NAIVE, {"initial_scale": 2**10}, FP16NaiveMixedPrecision(initial_scale=2.0**10, max_scale=None)),
    ],
)
def test_a_converted_model_trains_as_under_a_booster(mode: AMP_TYPE, options: dict[str, Any], precision: Any) -> None:
    model = make_model()
    model, optimizer, criterion = convert_to_amp(model, sgd(model), nn.CrossEntropyLoss(), mode, options)
    found = train(model, optimizer, criterion, lambda model, optimizer: optimizer.clip_grad_norm(model, 0.25))
    expected_model = make_model()
    booster = Booster(device="cpu", mixed_precision=precision)
    boosted, wrapper, loss, *_ = booster.boost(expected_model, sgd(expected_model), nn.CrossEntropyLoss())
    expected = train(boosted, wrapper, loss, lambda _, wrapper: wrapper.clip_grad_by_norm(0.25))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(one, other) for one, other in zip(found, make_model().parameters(), strict=True))


def test_the_naive_mode_starts_at_two_to_the_32_and_lowers_the_scale_until_gradients_fit() -> None:
    model = make_model()
    model, optimizer = convert_to_naive_amp(model, sgd(model))
    assert optimizer.scaler.scale_value == 2.0**32
    inputs, labels = make_batch()
    before = [parameter.detach().clone() for parameter in optimizer.parameters]
    skipped = 0
    for _ in range(30):
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        skipped += optimizer.scaler.skipped
        if not optimizer.scaler.skipped:
            break
    # the first overflow is forgiven (hysteresis 2), each further one halves the scale
    assert skipped > 1
    assert optimizer.scaler.scale_value == 2.0 ** (32 - (skipped - 1))
    assert any(not torch.equal(one, other) for one, other in zip(before, optimizer.parameters, strict=True))


def test_a_constant_scale_stays() -> None:
    model = make_model()
    options = {"dynamic_grad_scale": False, "initial_scale": 2.0**40}
    model, optimizer = convert_to_naive_amp(model, sgd(model), options)
    inputs, labels = make_batch()
    for _ in range(4):
        optimizer.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        assert optimizer.scaler.skipped
    assert optimizer.scaler.scale_value == 2.0**40


@pytest.mark.parametrize("name", ["clip_grad_norm", "clip_grad"])
def test_the_naive_mode_clips_as_it_is_told(name: str) -> None:
    """A step of SGD with a learning rate of 1 moves the master weights by the norm that gradients are clipped to."""
    model = make_model()
    options = {name: 1e-3, "initial_scale": 2.0**4}
    model, optimizer = convert_to_naive_amp(model, torch.optim.SGD(model.parameters(), lr=1.0), options)
    before = [each.detach().clone() for each in optimizer.parameters]
    inputs, labels = make_batch()
    optimizer.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    assert not optimizer.scaler.skipped
    moved = torch.cat([(now - old).flatten() for now, old in zip(optimizer.parameters, before, strict=True)])
    # master weights below 1 are rounded by 2^-24 each
    assert abs(moved.norm().item() - 1e-3) < 2**-24 * moved.numel() ** 0.5 + 1e-6
    with pytest.raises(ConfigError, match=r"one norm of at least 0. Found \[1.0, 2.0\]"):
        convert_to_naive_amp(make_model(), sgd(make_model()), {"clip_grad_norm": 1.0, "clip_grad": 2.0})


def test_torch_without_enabled_has_autocast_and_no_loss_scale() -> None:
    model = make_model()
    model, optimizer, _ = convert_to_torch_amp(model, sgd(model), amp_config={"enabled": False})
    inputs, labels = make_batch()
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs.float(), labels)
    assert outputs.dtype == torch.float16
    assert optimizer.scale_loss(loss) is loss
    precision = mixed_precision_from(AMP_TYPE.TORCH, {"enabled": False})
    _, wrapper, *_ = Booster(device="cpu", mixed_precision=precision).boost(own := make_model(), sgd(own))
    assert wrapper.scale_loss(loss) is loss


def test_apex_without_enabled_converts_nothing_and_needs_no_apex() -> None:
    model = make_model()
    model, optimizer = convert_to_apex_amp(model, sgd(model), {"enabled": False})
    expected = make_model()
    reference = sgd(expected)
    inputs, labels = make_batch()
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        reference.zero_grad()
        nn.functional.cross_entropy(expected(inputs), labels).backward()
        reference.step()
    for one, other in zip(optimizer.parameters, expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_apex_says_what_to_use_where_it_is_missing() -> None:
    model = make_model()
    with pytest.raises(UnsupportedError, match="mixed_precision='fp16'"):
        convert_to_apex_amp(model, sgd(model))


@pytest.mark.parametrize("mode", ["torch", None, 1])
def test_refuses_what_is_no_mode(mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"AMP_TYPE\.TORCH"):
        mixed_precision_from(mode)


@pytest.mark.parametrize("mode", [AMP_TYPE.TORCH, AMP_TYPE.APEX, AMP_TYPE.NAIVE])
def test_refuses_an_option_of_no_mode(mode: AMP_TYPE) -> None:
    with pytest.raises(ConfigError, match="first_scale"):
        mixed_precision_from(mode, {"first_scale": 3})


def test_does_not_change_the_options_of_the_config() -> None:
    options = {"dynamic_grad_scale": False, "initial_scale": 2.0}
    before = copy.deepcopy(options)
    mixed_precision_from(AMP_TYPE.NAIVE, options)
    assert options == before


# ------------------------------------------------------------------------------------------ base classes


class OverflowOfSomeRank(FP16MixedPrecisionMixin):
    rank = 1

    def check_local_overflow(self) -> bool:
        return dist.get_rank() == self.rank


def test_an_overflow_of_one_rank_skips_the_step_on_all() -> None:
    def program() -> list[Any]:
        mixin = OverflowOfSomeRank(initial_scale=64.0, hysteresis=2, growth_interval=1)
        scaled = mixin.pre_backward(torch.ones(())).item()
        skipped = [mixin.should_skip_step(), mixin.should_skip_step()]
        mixin.rank = 7
        return [scaled, *skipped, mixin.get_grad_div_scale(), mixin.should_skip_step(), mixin.loss_scale]

    assert run_threads(program, 2) == [[64.0, True, True, 32.0, False, 64.0]] * 2


def test_bfloat16_is_neither_scaled_nor_skipped() -> None:
    mixin, loss = BF16MixedPrecisionMixin(), torch.ones(())
    assert mixin.pre_backward(loss) is loss
    assert mixin.pre_backward_by_grad(loss, loss) is loss
    assert not mixin.should_skip_step()
    assert mixin.get_grad_div_scale() == 1.0


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_mixed_precision_optimizer_updates_master_weights(precision: str, dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    reference = make_model().to(dtype).float()
    optimizer = MixedPrecisionOptimizer(sgd(model), precision, initial_scale=2.0**8, max_norm=0.5)
    expected = sgd(reference)
    inputs, labels = make_batch()
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels))
        optimizer.step()
        expected.zero_grad()
        nn.functional.cross_entropy(reference(inputs), labels).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        expected.step()
    for master, working, value in zip(optimizer.parameters, model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(master, value, atol=3e-2, rtol=0)
        assert master.dtype == torch.float32
        assert torch.equal(master.to(dtype), working)


def test_a_mixed_precision_optimizer_refuses_parameters_of_another_precision() -> None:
    with pytest.raises(ConfigError, match=r"Found torch\.float32"):
        MixedPrecisionOptimizer(sgd(make_model()), "fp16")
    with pytest.raises(ConfigError, match="fp8"):
        MixedPrecisionOptimizer(sgd(make_model()), "fp8")
