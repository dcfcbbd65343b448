"""Root mean square normalization without gradients, in own code for host memory."""

import ctypes

import torch

from colossal._src.kernel.host_code import WIDEST_VECTORS, host_function

FUSED_DTYPES = frozenset({torch.float32, torch.bfloat16})
"""Of `rms_norm` and `rotate_heads`: of others, models compute in float32 what these would compute in float64."""


def has_fused_modules() -> bool:
    """Whether `rms_norm`, `rotate_heads` and `silu_product` run here: if their code could be built."""
    return all(host_function(name) is not None for name in ("rms_norm", "rotary", "gated_silu"))


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width")),
        ("eps", ctypes.c_double),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, level: int = WIDEST_VECTORS) -> torch.Tensor:
    """Divide rows by the root of the mean of their squares, and multiply them by a weight.

    It is computed in float32, and as models of transformers have it a quotient is rounded to the dtype of the rows
    before it is multiplied.

    Args:
        x: Of shape (..., width), of `FUSED_DTYPES`.
        weight: Of shape (width,), in the dtype of `x`.
        eps: What is added to the mean.
        level: 2 for the widest vectors of the processor, 1 for AVX2 at most, 0 for none.

    Returns:
        Of the shape and dtype of `x`.
    """
    function = host_function("rms_norm")
    assert function is not None
    rows, weight, width = x.contiguous(), weight.contiguous(), x.shape[-1]
    out = torch.empty_like(rows)
    addresses = rows.data_ptr(), weight.data_ptr(), out.data_ptr()
    function(_Rows(*addresses, rows.numel() // width, width, eps), x.dtype, level)
    return out
