"""The gate of feed-forward layers equals torch's operations in float64, and so do its gradients."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from colossal._src.kernel import gated_silu, silu, write_gate

TOLERANCES = [(torch.float32, 2e-6), (torch.float64, 4e-15), (torch.bfloat16, 8e-3)]


def kernel_is_there(is_there: bool) -> AbstractContextManager[Any]:
    """Go on as where it can be built, or as where it cannot."""
    return mock.patch.object(silu, "host_function", silu.host_function if is_there else lambda _: None)


def by_torch(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, 1)
    return functional.silu(gate) * up


def draw(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and gradients."""
    generator = torch.Generator().manual_seed(0)
    gate_up, grad = (torch.randn(rows, each * width, generator=generator, dtype=torch.float64) for each in (2, 1))
    gate_up[:1, :2] *= 50  # where the sigmoid is 0 or 1
    return (4 * gate_up).to(dtype).requires_grad_(), grad.to(dtype)


@pytest.mark.parametrize("level", [0, 1, 2, None])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("sizes", [(5, 64), (3, 37), (0, 8)], ids=str)
def test_equals_float64(sizes: tuple[int, int], dtype: torch.dtype, tolerance: float, level: int | None) -> None:
    """Without a level, code of its own could not be built."""
    gate_up, grad = draw(*sizes, dtype)
    with kernel_is_there(level is not None):
        assert silu.has_gate_kernel(gate_up.detach()) == (level is not None)
        values = gated_silu(gate_up, level or 0)
        values.backward(grad)
    full = gate_up.detach().double().requires_grad_()
    expected = by_torch(full)
    expected.backward(grad.double())
    assert gate_up.grad is not None
    for found, right in ((values, expected), (gate_up.grad, full.grad)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_is_not_finite_shows(level: int) -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, nan, 1.0, 1.0, -1e30, 1e30], dtype=torch.float32).repeat(8)
    up = torch.tensor([1.0, 1.0, inf, nan, 1.0, 1.0], dtype=torch.float32).repeat(8)
    values = gated_silu(torch.cat([gate, up])[None], level)
    expected = torch.tensor([inf, nan, inf, nan, 0.0, 1e30], dtype=torch.float32).repeat(8)
    torch.testing.assert_close(values[0], expected, equal_nan=True)


def test_features_that_are_not_contiguous() -> None:
    gate_up, grad = draw(4, 16, torch.float32)
    wide = torch.stack([gate_up.detach(), gate_up.detach()], 2)[..., 0].requires_grad_()
    found, expected = (
        torch.autograd.grad(function(each), each, grad.expand(4, 16))[0]
        for function, each in ((gated_silu, wide), (by_torch, gate_up))
    )
    torch.testing.assert_close(found, expected)
    (summed,) = torch.autograd.grad(gated_silu(wide).sum(), wide)  # whose gradient is expanded
    torch.testing.assert_close(summed, torch.autograd.grad(by_torch(gate_up).sum(), gate_up)[0])


def test_threads_share_the_rows() -> None:
    gate_up, grad = draw(331, 1024, torch.float32)
    before, found = torch.get_num_threads(), list[torch.Tensor]()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.extend(torch.autograd.grad(gated_silu(gate_up), gate_up, grad))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("width", [64, 37])
def test_factors_of_rows_and_memory_that_is_written_over(width, dtype, tolerance, level) -> None:
    gate_up, grad = (each.detach() for each in draw(5, width, dtype))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    factors, of_factors = torch.linspace(-2, 2, 5, dtype=exact), torch.empty(5, dtype=exact)
    full, scale = gate_up.double().requires_grad_(), factors.double().requires_grad_()
    expected = by_torch(full) * scale[:, None]
    of_full, of_scale = torch.autograd.grad(expected, (full, scale), grad.double())
    values = torch.empty_like(grad)
    write_gate(gate_up, values, factors=factors, level=level)
    torch.testing.assert_close(values.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    over = gate_up.clone(), grad.clone()
    places = {"grad": over[1], "grads": over[0], "factors": factors, "of_factors": of_factors}
    write_gate(over[0], over[1], **places, level=level)
    assert torch.equal(over[1], values)
    torch.testing.assert_close(over[0].double(), of_full, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(of_factors.double(), of_scale, rtol=width * tolerance, atol=width * tolerance)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_twice_differentiable(has_kernel: bool) -> None:
    gate_up, _ = draw(3, 4, torch.float64)
    gate_up = (gate_up / 100).detach().requires_grad_()
    with kernel_is_there(has_kernel):
        assert torch.autograd.gradcheck(gated_silu, (gate_up,))
        assert torch.autograd.gradgradcheck(gated_silu, (gate_up,))
