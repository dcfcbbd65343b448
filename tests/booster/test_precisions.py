# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false
"""What each mixed precision does to a model, whatever the plugin."""

from typing import Any

import pytest
import torch
from digits import digits
from torch import nn

from colossal._src.amp import FP8Linear
from colossal.booster import Booster
from colossal.booster.mixed_precision import (
    FP8MixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    mixed_precision_factory,
)
from colossal.errors import ConfigError, UnsupportedError
from colossal.interface import ModelWrapper, OptimizerWrapper
from colossal.logging import get_dist_logger
from colossal.nn.lr_scheduler import LinearWarmupLR

# ------------------------------------------------------------------------------------------ all of them

PRECISIONS = ["fp16", "fp16_naive", "bf16", "fp8"]
MARGIN = 0.02
"""Five of the 261 digits that are not trained on."""


def accuracy(precision: str | None) -> float:
    """Train a small convolutional net on the digits, and return its accuracy on those that it has not seen."""
    torch.manual_seed(1)
    images, labels = digits()
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    labels = torch.tensor(labels)[order]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = LinearWarmupLR(optimizer, total_steps=72, warmup_steps=4)
    booster = Booster(device="cpu", mixed_precision=precision)
    model, optimizer, criterion, _, schedule = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=schedule
    )
    for _ in range(3):
        for start in range(0, 1536, 64):
            part = slice(start, start + 64)
            booster.backward(criterion(model(images[part]), labels[part]), optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return (model(images[1536:]).argmax(1) == labels[1536:]).float().mean().item()


@pytest.fixture(scope="module")
def accuracies() -> dict[str | None, float]:
    get_dist_logger().set_level("WARNING")
    try:
        return {precision: accuracy(precision) for precision in (None, *PRECISIONS)}
    finally:
        get_dist_logger().set_level("INFO")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns_the_digits_as_well_as_float32(precision, accuracies) -> None:
    assert accuracies[None] > 0.95
    assert accuracies[precision] > accuracies[None] - MARGIN


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_name_stands_for_an_object_of_that_name(precision) -> None:
    made = mixed_precision_factory(precision)
    assert isinstance(made, MixedPrecision)
    assert made.name == precision


# ------------------------------------------------------------------------------------------ checkpoints


def run(booster: Booster, model: ModelWrapper, optimizer: OptimizerWrapper, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        inputs = torch.linspace(-1, 1, 8 * 16).view(8, 16).roll(step, 0)
        loss = (model(inputs).float() ** 2).mean() / 100  # no overflow at the first scale
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def boosted(precision: str | None, seed: int) -> tuple[Booster, ModelWrapper, OptimizerWrapper]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
    booster = Booster(device="cpu", mixed_precision=precision)
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    return booster, model, optimizer


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(precision, shard, tmp_path) -> None:
    booster, model, optimizer = boosted(precision, 0)
    run(booster, model, optimizer, 5)
    optimizer.scaler.load_state_dict(optimizer.scaler.state_dict() and optimizer.scaler.state_dict() | {"scale": 512.0})
    booster.save_model(model, tmp_path / "model", shard=shard)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=shard)
    again, twin, twin_optimizer = boosted(precision, 1)
    again.load_model(twin, tmp_path / "model")
    again.load_optimizer(twin_optimizer, tmp_path / "optimizer")
    assert twin_optimizer.scaler.state_dict() == optimizer.scaler.state_dict()
    assert run(again, twin, twin_optimizer, 5) == run(booster, model, optimizer, 5)
    for own, other in zip(twin_optimizer.parameters, optimizer.parameters, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("target", [None, *PRECISIONS])
@pytest.mark.parametrize("source", [None, "fp16", "fp16_naive"])
def test_a_run_may_go_on_in_another_precision(source, target, tmp_path) -> None:
    booster, model, optimizer = boosted(source, 0)
    run(booster, model, optimizer, 5)
    booster.save_model(model, tmp_path / "model")
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    again, twin, twin_optimizer = boosted(target, 1)
    again.load_model(twin, tmp_path / "model")
    again.load_optimizer(twin_optimizer, tmp_path / "optimizer")
    for own, other in zip(twin_optimizer.parameters, optimizer.parameters, strict=True):
        torch.testing.assert_close(own, other, rtol=2**-11, atol=2**-24)  # the model was saved in float16 at the worst
    for own, other in zip(model.unwrap().parameters(), twin.unwrap().parameters(), strict=True):
        torch.testing.assert_close(other.float(), own.float(), rtol=2**-10, atol=2**-24)
    expected, actual = run(booster, model, optimizer, 3), run(again, twin, twin_optimizer, 3)
    rtol = 0.3 if target == "fp8" else 0.05  # a small loss: outputs that nearly cancel, with 3 bits of fraction
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=rtol, atol=0)


def test_a_model_that_is_loaded_alone_reaches_the_masters(tmp_path) -> None:
    booster, model, optimizer = boosted(None, 0)
    booster.save_model(model, tmp_path / "model")
    again, twin, twin_optimizer = boosted("fp16_naive", 1)
    again.load_model(twin, tmp_path / "model")
    for group in twin_optimizer.param_groups:
        group["lr"] = 0.0
    run(again, twin, twin_optimizer, 1)
    assert not twin_optimizer.scaler.skipped
    for own, other in zip(twin_optimizer.parameters, optimizer.parameters, strict=True):
        torch.testing.assert_close(own, other, rtol=2**-11, atol=2**-24)
    for own, master in zip(twin.unwrap().parameters(), twin_optimizer.parameters, strict=True):
        assert torch.equal(own, master.to(own.dtype))


# ------------------------------------------------------------------------------------------ fp16_naive


def boost_naive(model: nn.Module, lr: float = 0.5, **options) -> tuple[Booster, ModelWrapper, OptimizerWrapper]:  # noqa: ANN003
    booster = Booster(device="cpu", mixed_precision=FP16NaiveMixedPrecision(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr))
    return booster, model, optimizer


def test_the_whole_model_computes_in_float16() -> None:
    seen = {}

    class Spy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name that nn.Linear has)
            seen[self.weight.dtype] = input.dtype, torch.is_autocast_enabled("cpu")
            return super().forward(input)

    booster, model, optimizer = boost_naive(Spy(4, 3))
    output = model(torch.ones(2, 4, dtype=torch.float64))
    assert seen == {torch.float16: (torch.float16, False)}
    assert output.dtype == torch.float32
    booster.backward(output.sum(), optimizer)
    assert model.unwrap().weight.grad.dtype == torch.float16
    optimizer.step()
    assert {parameter.dtype for parameter in optimizer.parameters} == {torch.float32}


def test_running_statistics_keep_moving() -> None:
    """A mean that is close to its target by less than half a step of float16 would stop where it is."""
    norm = nn.BatchNorm1d(4, momentum=0.001)
    _, model, _ = boost_naive(norm)
    for _ in range(1000):
        model(torch.full((8, 4), 100.0) + torch.linspace(-1, 1, 8)[:, None])
    assert norm.running_mean.dtype == torch.float32
    expected = 100 * (1 - 0.999**1000)
    torch.testing.assert_close(norm.running_mean, torch.full((4,), expected), rtol=1e-3, atol=0)
    half = torch.zeros((), dtype=torch.float16)
    for _ in range(1000):
        half = half * 0.999 + torch.tensor(100.0).half() * 0.001
    assert abs(half.item() - expected) > 1


def test_the_defaults_drop_steps_with_hysteresis() -> None:
    booster, model, optimizer = boost_naive(nn.Linear(4, 1))
    scales = []
    for factor in (1.0, torch.inf, 1.0, torch.inf, torch.inf):
        booster.backward(model(torch.ones(2, 4)).mean() * 0.1 * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scales.append((optimizer.scaler.skipped, optimizer.scaler.scale_value))
    assert scales == [(False, 2.0**16), (True, 2.0**16), (False, 2.0**16), (True, 2.0**15), (True, 2.0**14)]


def test_options_reach_the_scaler_and_the_log(logged) -> None:
    booster, model, optimizer = boost_naive(
        nn.Linear(4, 1, bias=False),
        log_num_zeros_in_grad=True,
        initial_scale=8.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        hysteresis=1,
        max_scale=16.0,
        verbose=True,
        growth_interval=1,
        min_scale=4.0,
    )
    for factor in (1.0, torch.inf, torch.inf):
        booster.backward(model(torch.tensor([[1.0, 0.0, 0.0, 0.0]])).sum() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    prefix = "[rank 0] "
    assert [message.removeprefix(prefix) for message in logged()] == [
        "3 of 4 gradient elements are 0 (75.0%)",
        "1 steps without an overflow: loss scale 8 -> 16",
        "0 of 4 gradient elements are 0 (0.0%)",
        "step skipped, a gradient overflowed: loss scale 16 -> 4",
        "0 of 4 gradient elements are 0 (0.0%)",
        "step skipped, a gradient overflowed: loss scale 4 -> 4",
    ]


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="Found hysteresis=0"):
        FP16NaiveMixedPrecision(hysteresis=0)
    with pytest.raises(ConfigError, match="Found max_scale=4"):
        FP16NaiveMixedPrecision(max_scale=4.0)


def test_a_model_alone_is_cast_too() -> None:
    model, *rest = Booster(device="cpu", mixed_precision="fp16_naive").boost(nn.Linear(4, 3))
    assert rest == [None] * 4
    assert model.unwrap().weight.dtype == torch.float16
    assert model(torch.ones(2, 4)).dtype == torch.float32


def test_rotary_frequencies_of_a_language_model_stay_exact() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes))
    tokens = torch.arange(512)[None] % 64
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        wrapped, *_ = Booster(device="cpu", mixed_precision="fp16_naive").boost(model)
        output = wrapped(input_ids=tokens)
    assert output.logits.dtype == torch.float32
    assert (output.logits - expected).abs().max() < 0.01 * expected.abs().max()
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert (511 * (frequencies - frequencies.half().float())).abs().max() > 0.03  # radians, at the last token


# ------------------------------------------------------------------------------------------ fp8


def test_linear_layers_that_fit_are_converted_in_place(logged) -> None:
    class Heir(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 10), Heir(10, 16), nn.Linear(16, 16))
    model[4].weight.requires_grad_(requires_grad=False)
    names, weights = list(model.state_dict()), list(model.parameters())
    booster = Booster(device="cpu", mixed_precision="fp8")
    wrapped, *_ = booster.boost(model)
    assert [type(layer) for layer in model] == [FP8Linear, nn.LayerNorm, nn.Linear, Heir, FP8Linear]
    assert list(model.state_dict()) == names
    assert all(own is other for own, other in zip(model.parameters(), weights, strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert wrapped(torch.ones(2, 32)).dtype == torch.bfloat16
    (message,) = logged()
    assert "fp8: 2 of 3 linear layers multiply in float8" in message
    assert "not multiples of 16: 2 (48 x 10)" in message
    assert "emulated, because cpu devices here have no float8 units" in message


def test_a_model_may_be_boosted_again() -> None:
    get_dist_logger().set_level("WARNING")
    model = nn.Linear(16, 16)
    for _ in range(2):
        Booster(device="cpu", mixed_precision=FP8MixedPrecision()).boost(model)
    assert type(model) is FP8Linear
    get_dist_logger().set_level("INFO")


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Conv2d(1, 1, 1), "none in Conv2d. Pass 'bf16'"),
        (nn.Linear(16, 10), r"not multiples of 16: itself \(16 x 10\)"),
    ],
)
def test_a_model_without_a_layer_that_fits_is_refused(model, found) -> None:
    with pytest.raises(UnsupportedError, match=found):
        Booster(device="cpu", mixed_precision="fp8").boost(model)


def test_a_precision_takes_an_optimizer_of_torch() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optim, criterion = FP16TorchMixedPrecision(init_scale=2.0).configure(model, optimizer, torch.mean)
    assert optim is not None and criterion is not None  # noqa: PT018
    assert optim.unwrap() is optimizer
    optim.backward(criterion(wrapped(torch.ones(3, 4))))
    before = model.weight.detach().clone()
    optim.step()
    assert not torch.equal(before, model.weight)
