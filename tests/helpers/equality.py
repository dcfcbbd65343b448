"""Comparing with one process: how far results may lie apart, and why nothing but an error gets there."""

import sys

import torch

ROUNDING = 8.0
"""How many times the rounding of one process ranks may be away from it, if both round.

Two runs in half precision differ from the exact one by roundings that are as large and as many, but independent: ranks
multiply the parts of a batch, and round each sum once more. In the norm over a tensor, which thousands of them average
out, this puts the runs about twice as far apart as one of them is from the exact one. An error of the method is further
away: the tests leave the reduction out, and must fail.
"""

RTOL = 1e-8
"""Of the largest element of a float64 tensor.

Rounding moves a float64 result by some 1e-16 of its terms, and training for a few steps enlarges that, here by less
than a thousand; so rounding stays five orders of magnitude below this limit on any processor. A term that is missing,
doubled or in the wrong place changes a result by more than 1e-4 of it: four orders of magnitude above.
"""

ATOL = 1e-13
"""Where the terms of a sum cancel, such as in the gradient of a bias that softmax takes out again, rounding is left."""


def exactly_apart(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far float64 results lie apart, in units of what rounding cannot reach."""
    if not expected.numel():
        return 0.0
    limit = ATOL + RTOL * expected.abs().max().item()
    return (actual.double() - expected).abs().max().item() / limit


def rounding_apart(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Return how far results in half precision lie apart, in units of what rounding explains.

    `exact` is what one process computes in float64. Where it happened to round luckily, a rounding of each element by
    `dtype` counts as its error.
    """
    actual, expected, exact = actual.double(), expected.double(), exact.double()
    least = torch.finfo(dtype).eps * exact.norm()
    limit = ROUNDING * torch.maximum((expected - exact).norm(), least).item()
    return (actual - expected).norm().item() / max(limit, sys.float_info.min)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Compare what ranks computed in float64 with one process."""
    assert expected.dtype == torch.float64, f"{name}: {expected.dtype} is not compared by this limit"
    limit = ATOL + (RTOL * expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit, msg=lambda text: f"{name}: {text}")


def assert_within_rounding(
    actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, name: str
) -> None:
    """Compare what ranks computed in half precision with one process that did so too, by what rounding did to that."""
    apart = rounding_apart(actual, expected, exact, dtype)
    assert apart <= 1, f"{name}: the norm of the difference is {apart:.3g} times what rounding explains"
