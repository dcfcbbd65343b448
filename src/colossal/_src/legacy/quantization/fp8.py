"""A linear layer in 8-bit floating point, as a function."""

import torch
from torch.func import functional_call

from colossal._src.amp import FP8Linear
from colossal._src.legacy.notice import superseded


def linear_fp8(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 (the documented name)
    """Multiply by a weight in 8-bit floating point, forward and backward, and add a bias.

    Args:
        input: (..., in).
        weight: (out, in).
        bias: (out,).

    Returns:
        (..., out), in the type of the input, or of autocast.

    Example:
        >>> import torch
        >>> from colossal.legacy.quantization import linear_fp8
        >>> linear_fp8(torch.ones(2, 16), torch.ones(16, 16))[0, 0].item()
        16.0
    """
    superseded("colossal.quantization.fp8.linear_fp8", "Booster(mixed_precision='fp8')")
    layer = FP8Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return functional_call(layer, given, (input,))
