# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Linear layers in float8, against a reference in NumPy that knows the formats by their bits only."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from chosen import ALL
from hypothesis import example as explicit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal._src.amp import FP8Linear, fp8_linear
from colossal._src.amp.fp8_linear import quantize_fp8
from colossal.testing import run_processes

# ------------------------------------------------------------------------------------------ the reference


@dataclass(frozen=True)
class Format:
    """A format of 1 sign bit, some exponent bits and some mantissa bits."""

    dtype: torch.dtype
    mantissa_bits: int
    bias: int
    largest_code: int  # the bits of the largest finite number

    @property
    def numbers(self) -> np.ndarray:
        """All numbers that are not negative, in order of their bits, and so of their size."""
        codes = np.arange(self.largest_code + 1)
        exponents, mantissas = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        fractions = mantissas / (1 << self.mantissa_bits) + (exponents > 0)
        return fractions * 2.0 ** (np.maximum(exponents, 1) - self.bias)

    @property
    def unit(self) -> float:
        """Half of the distance from 1 to the next number: the largest relative error of rounding."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def smallest(self) -> float:
        return self.numbers[1]

    def scale(self, values: np.ndarray) -> float:
        """The smallest power of two by which division makes every element fit."""
        largest = np.abs(values).max()
        return 2.0 ** max(math.ceil(math.log2(largest / self.numbers[-1])), -126) if largest else 1.0

    def round(self, values: np.ndarray) -> np.ndarray:
        """The nearest numbers; of two that are as near, the one whose last bit is 0."""
        numbers, scaled = self.numbers, np.abs(values) / self.scale(values)
        above = np.searchsorted(numbers, scaled).clip(1, len(numbers) - 1)
        low, high = scaled - numbers[above - 1], numbers[above] - scaled
        up = (high < low) | ((high == low) & (above % 2 == 0))
        return np.copysign(np.where(up, numbers[above], numbers[above - 1]), values) * self.scale(values)


E4M3 = Format(torch.float8_e4m3fn, 3, 7, 0x7E)
E5M2 = Format(torch.float8_e5m2, 2, 15, 0x7B)
FORMATS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])

TENSORS = st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=20)
MODERATE = st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=20)


def dequantised(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    rounded, scale = quantize_fp8(values, dtype)
    assert rounded.dtype == dtype
    assert scale.dtype == torch.float32
    return rounded.double().numpy() * scale.item()


def test_the_formats_are_torchs() -> None:
    for form, largest, step, smallest in ((E4M3, 448, 1 / 8, 2.0**-9), (E5M2, 57344, 1 / 4, 2.0**-16)):
        info = torch.finfo(form.dtype)
        assert form.numbers[-1] == info.max == largest
        assert 2 * form.unit == info.eps == step
        assert form.smallest == smallest
        codes = torch.arange(form.largest_code + 1, dtype=torch.uint8).view(form.dtype)
        assert np.array_equal(codes.double().numpy(), form.numbers)


# ------------------------------------------------------------------------------------------ rounding


@pytest.mark.chosen
@FORMATS
@settings(max_examples=300 if ALL else 150, deadline=None)
@given(values=TENSORS)
@explicit(values=[2.9987787136551085e-43])  # divided by the largest number of a format, this is 0 in float32
def test_rounding_is_that_of_the_reference(form, values) -> None:
    tensor = torch.tensor(values)
    assert np.array_equal(dequantised(tensor, form.dtype), form.round(tensor.double().numpy()))


@pytest.mark.chosen
@FORMATS
@settings(max_examples=200 if ALL else 100, deadline=None)
@given(values=TENSORS)
def test_the_error_is_half_a_step(form, values) -> None:
    exact = torch.tensor(values).double().numpy()
    bound = np.maximum(form.unit * np.abs(exact), form.smallest * form.scale(exact) / 2)
    assert (np.abs(dequantised(torch.tensor(values), form.dtype) - exact) <= bound).all()


@FORMATS
def test_the_bound_of_the_error_is_reached(form) -> None:
    exact = torch.tensor([1 + form.unit, form.numbers[-1]])
    assert dequantised(exact, form.dtype)[0] == 1.0


@pytest.mark.chosen
@FORMATS
@settings(max_examples=200 if ALL else 100, deadline=None)
@given(values=MODERATE, cut=st.integers(1, 19))
def test_the_parts_of_a_tensor_round_like_the_whole(form, values, cut) -> None:
    """Unless an element is small enough to lose digits: one scale per part would change nearly every element."""
    tensor = torch.tensor(values)
    whole, scale = dequantised(tensor, form.dtype), form.scale(tensor.double().numpy())
    parts = [dequantised(part, form.dtype) for part in (tensor[:cut], tensor[cut:]) if part.numel()]
    normal = tensor.abs().double().numpy() >= scale * 2.0 ** (1 - form.bias)
    assert np.array_equal(np.concatenate(parts)[normal], whole[normal])


@FORMATS
@pytest.mark.parametrize("power", [-140, -126, -100, 0, 60, 112])
def test_the_largest_element_never_overflows(form, power) -> None:
    edges = [1.0, 1.0 + 2**-23, 1.03, 1.07, 1.5, 2.0 - 2**-23]
    for edge in edges:
        values = torch.tensor([edge, -edge / 2, 0.0]) * (form.numbers[-1] / 1.75) * 2.0**power
        result = dequantised(values, form.dtype)
        assert np.isfinite(result).all()
        if power >= -126:
            assert abs(result[0] / values[0].double().item() - 1) <= form.unit


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_input_type_rounds_alike(form, dtype) -> None:
    values = torch.linspace(-3, 5, 97).to(torch.bfloat16).to(torch.float16)
    assert np.array_equal(dequantised(values.to(dtype), form.dtype), dequantised(values.float(), form.dtype))


@FORMATS
def test_zeros_stay_zeros(form) -> None:
    rounded, scale = quantize_fp8(torch.zeros(4, 3), form.dtype)
    assert scale == 1
    assert not rounded.float().any()


@FORMATS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_spoils_the_scale(form, bad) -> None:
    assert quantize_fp8(torch.tensor([1.0, bad]), form.dtype)[1].isnan()


# ------------------------------------------------------------------------------------------ the layer

SHAPES = [(5, 32, 16), (16, 48, 32), (2, 3, 64, 16)]


def example(shape: tuple[int, ...], bias: bool = True) -> tuple[FP8Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    *rows, inner, columns = shape
    linear = FP8Linear(inner, columns, bias=bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    inputs = torch.randn(*rows, inner, generator=generator).requires_grad_()
    return linear, inputs, torch.randn(*rows, columns, generator=generator)


def reference(linear: nn.Linear, inputs: torch.Tensor, grad: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Output and gradients of input, weight and bias, in float64 between the roundings to 8 bits."""
    x = E4M3.round(inputs.detach().double().numpy()).reshape(-1, linear.in_features)
    w = E4M3.round(linear.weight.detach().double().numpy())
    g = E5M2.round(grad.double().numpy()).reshape(-1, linear.out_features)
    output = x @ w.T + (0 if linear.bias is None else linear.bias.detach().double().numpy())
    bias = grad.double().numpy().reshape(-1, linear.out_features).sum(0)
    return output.reshape(grad.shape), (g @ w).reshape(inputs.shape), g.T @ x, bias


@pytest.fixture(params=[False, True], ids=["emulated", "torch's kernel"])
def _kernel(request, monkeypatch) -> None:
    """torch has its 8-bit product on CPUs too, so that the path of GPUs runs here."""
    monkeypatch.setattr(fp8_linear, "has_float8", lambda _: request.param)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_the_reference(shape, bias) -> None:
    linear, inputs, grad = example(shape, bias)
    output = linear(inputs)
    output.backward(grad)
    expected = reference(linear, inputs, grad)
    actual = [output.detach(), inputs.grad, linear.weight.grad, *([linear.bias.grad] if bias else [])]
    for own, other in zip(actual, expected, strict=False):
        assert own.dtype == torch.float32
        np.testing.assert_allclose(own.double().numpy(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_kernel")
def test_autocast_decides_the_type_of_the_output() -> None:
    linear, inputs, grad = example((5, 32, 16))
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(inputs)
        output.backward(grad.bfloat16())
    assert output.dtype == torch.bfloat16
    assert linear.weight.grad.dtype == inputs.grad.dtype == torch.float32
    expected = reference(linear, inputs, grad.bfloat16())
    for own, other in zip([output.detach(), inputs.grad, linear.weight.grad], expected, strict=False):
        np.testing.assert_allclose(own.double().numpy(), other, rtol=2**-7, atol=2**-7)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.1, 3))
def test_the_error_of_a_product_is_bounded_by_the_mantissas(seed, spread) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = FP8Linear(64, 16, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(16, 64, generator=generator) * spread)
    inputs = torch.randn(8, 64, generator=generator)
    x, w = inputs.double().numpy(), linear.weight.detach().double().numpy()
    exact, rounded = x @ w.T, linear(inputs).detach().double().numpy()
    tiny_x, tiny_w = (E4M3.smallest * E4M3.scale(values) / 2 for values in (x, w))
    error_x, error_w = E4M3.unit * np.abs(x) + tiny_x, E4M3.unit * np.abs(w) + tiny_w
    bound = error_x @ np.abs(w).T + np.abs(x) @ error_w.T + error_x @ error_w.T
    assert (np.abs(rounded - exact) <= bound * (1 + 1e-5)).all()
    assert (np.abs(rounded - exact) > 0).any()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_propagates(bad) -> None:
    linear, inputs, grad = example((4, 32, 16))
    spoilt = inputs.detach().clone()
    spoilt[1, 2] = bad
    assert linear(spoilt).isnan().all()
    grad[0, 0] = bad
    linear(inputs).backward(grad)
    assert inputs.grad.isnan().all()
    assert linear.weight.grad.isnan().all()
    with torch.no_grad():
        linear.weight[0, 0] = bad
    assert linear(inputs).isnan().all()


def test_only_what_needs_a_gradient_gets_one() -> None:
    linear, inputs, grad = example((4, 32, 16))
    linear.weight.requires_grad_(requires_grad=False)
    linear(inputs).backward(grad)
    assert linear.weight.grad is None
    assert inputs.grad is not None
    linear, inputs, grad = example((4, 32, 16))
    linear(inputs.detach()).backward(grad)
    assert linear.weight.grad is not None
    with torch.no_grad():
        assert linear(inputs).grad_fn is None


def test_an_empty_batch_is_an_empty_batch() -> None:
    linear, *_ = example((4, 32, 16))
    assert linear(torch.zeros(0, 32)).shape == (0, 16)


def test_activations_are_kept_in_a_quarter_of_their_bytes() -> None:
    linear, inputs, _ = example((64, 32, 16))
    saved = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(inputs)
    kept = sum(tensor.nbytes for tensor in saved if tensor is not linear.weight)
    assert kept == inputs.nbytes // 4 + 4


def test_a_layer_is_a_linear_layer_in_everything_else() -> None:
    linear, inputs, grad = example((4, 32, 16))
    twin = nn.Linear(32, 16)
    twin.load_state_dict(linear.state_dict())
    twin.__class__ = FP8Linear
    assert torch.equal(copy.deepcopy(twin)(inputs), linear(inputs))
    linear(inputs).backward(grad)
    expected = inputs.grad
    inputs.grad = None
    checkpoint(twin, inputs, use_reentrant=False).backward(grad)
    assert torch.equal(inputs.grad, expected)
    assert torch.equal(twin.weight.grad, linear.weight.grad)


# ------------------------------------------------------------------------------------------ sharded


def train_sharded(shard: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(4)
    model = nn.Sequential(FP8Linear(32, 48), nn.Tanh(), FP8Linear(48, 16))
    if shard:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = torch.linspace(-1, 1, 8 * 32).view(8, 32).sin()
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(inputs).float() ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weight = model[0].weight.detach()
    return torch.stack(losses), weight.full_tensor() if shard else weight


def test_a_sharded_layer_computes_the_same() -> None:
    expected = train_sharded(shard=False)
    assert expected[0][-1] < expected[0][0] / 2
    for losses, weight in run_processes(train_sharded, 2, shard=True):
        torch.testing.assert_close(losses, expected[0])
        torch.testing.assert_close(weight, expected[1])
