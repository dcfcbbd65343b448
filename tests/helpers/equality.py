"""Comparing with one process: how far results may lie apart, and why nothing but an error gets there."""

import torch

RTOL = 1e-8
"""Of the largest element of a float64 tensor.

Rounding moves a float64 result by some 1e-16 of its terms, and training for a few steps enlarges that, here by less
than a thousand; so rounding stays five orders of magnitude below this limit on any processor. A term that is missing,
doubled or in the wrong place changes a result by more than 1e-4 of it: four orders of magnitude above.
"""


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Compare what ranks computed in float64 with one process."""
    assert expected.dtype == torch.float64, f"{name}: {expected.dtype} is not compared by this limit"
    limit = RTOL * expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit, msg=lambda text: f"{name}: {text}")
