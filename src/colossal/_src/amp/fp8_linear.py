"""Linear layers that compute their matrix products in 8-bit floating point, forward and backward.

A tensor is divided by one power of two, such that its largest element just fits, and rounded to 8 bits. A power of two
changes exponents only: an element rounds in the same way whichever power it is, unless it is very small. So the
micro-batches of a batch, each with a power of its own, give what the full batch gives.

=====================  ==============  ===========  ==================================
type                   largest number  step at 1    used for
=====================  ==============  ===========  ==================================
`torch.float8_e4m3fn`  448             1/8          inputs and weights
`torch.float8_e5m2`    57344           1/4          gradients, which need more range
=====================  ==============  ===========  ==================================

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433.
"""

from typing import Any, final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

FORWARD_DTYPE = torch.float8_e4m3fn
"""Inputs and weights: more precision."""

BACKWARD_DTYPE = torch.float8_e5m2
"""Gradients: more range."""

SIZE_MULTIPLE = 16
"""The units for 8-bit products take sizes that are multiples of this."""

_MIN_EXPONENT = -126


def has_float8(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit floating-point numbers itself."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@torch.no_grad()
def quantize_fp8(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a tensor to 8 bits, relative to its largest element.

    Args:
        tensor: Any shape, in float32, bfloat16 or float16.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        The rounded values, of the tensor's shape in `dtype`, and their scale, a power of two in float32, of shape ():
        the tensor is about the one times the other. The scale is NaN if an element is infinite or NaN.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433.

    Example:
        >>> import torch
        >>> from colossal.amp import quantize_fp8
        >>> values, scale = quantize_fp8(torch.tensor([1.0, -2.0, 0.3]), torch.float8_e4m3fn)
        >>> values.float() * scale
        tensor([ 1.0000, -2.0000,  0.3125])
    """
    low, high = torch.aminmax(tensor)
    largest = torch.maximum(-low, high).float()
    ratio = (largest / torch.finfo(dtype).max).clamp(min=2.0**_MIN_EXPONENT)  # subnormal ones may divide to 0
    # the scale is rounded up to a power of two, so that scaling itself is exact
    mantissa, exponent = torch.frexp(torch.where(largest > 0, ratio, 0.0))
    exponent = exponent - (mantissa == 0.5).int()  # noqa: PLR2004 (a power of two already)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    wide = tensor.float() if tensor.dtype == torch.float16 else tensor  # float16 cannot hold every scale
    return (wide * scale.reciprocal()).to(dtype), scale


def scaled_matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply two matrices of 8-bit numbers, adding up in float32."""
    if has_float8(a.device):  # the units want rows of `a` and columns of `b` to be contiguous
        b = b.t().contiguous().t()
        scaled_mm = torch._scaled_mm  # noqa: SLF001 (torch has no public name for it)
        return scaled_mm(a.contiguous(), b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)
    # autocast would multiply in half precision, which the units for 8 bits do not
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float() * a_scale * b_scale).to(dtype)


class _FP8LinearFunction(torch.autograd.Function):
    """The product of an input (rows, in) and a weight (out, in); keeps the input in 8 bits for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x, x_scale = quantize_fp8(inputs, FORWARD_DTYPE)
        w, w_scale = quantize_fp8(weight, FORWARD_DTYPE)
        ctx.save_for_backward(x, x_scale, weight)  # not `w`: a sharded weight is gathered again, and freed until then
        ctx.dtype = inputs.dtype
        return scaled_matmul(x, x_scale, w.t(), w_scale, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, x_scale, weight = ctx.saved_tensors
        g, g_scale = quantize_fp8(grads[0], BACKWARD_DTYPE)
        grad_inputs = grad_weight = None
        if ctx.needs_input_grad[0]:
            w, w_scale = quantize_fp8(weight, FORWARD_DTYPE)
            grad_inputs = scaled_matmul(g, g_scale, w, w_scale, ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = scaled_matmul(g.t(), g_scale, x, x_scale, weight.dtype)
        return grad_inputs, grad_weight, None


@final
class FP8Linear(nn.Linear):
    """A linear layer that multiplies in 8-bit floating point and is an `torch.nn.Linear` in everything else.

    The weight stays in the type that it has, usually float32, and is rounded anew in each pass. Under autocast the
    output is in autocast's type, else in that of the input. On a GPU that has 8-bit units they compute; elsewhere the
    rounded numbers are multiplied in float32, which gives the same results and saves no time.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name that nn.Linear has)
        """Multiply by the weight and add the bias."""
        # an empty tensor has no largest element
        if not input.numel():
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        rows = input.reshape(-1, self.in_features)
        missing = -rows.shape[0] % SIZE_MULTIPLE if has_float8(input.device) else 0
        padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        output: Any = _FP8LinearFunction.apply(padded, self.weight, dtype)
        output = output[: rows.shape[0]].view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(dtype)


def has_fp8_sizes(linear: nn.Linear) -> bool:
    """Whether both sizes of a linear layer are multiples of 16."""
    return not (linear.in_features % SIZE_MULTIPLE or linear.out_features % SIZE_MULTIPLE)
