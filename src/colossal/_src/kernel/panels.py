"""Products of a few rows and a weight in the order in which they read it, in own code for host memory.

A weight of shape (N, K) lies in panels of 32 of its N outputs, which are filled up with zeros: in float32 of shape
(panels, K, 32); in bfloat16 (panels, K / 2, 32, 2), as tiles of processors take it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import ctypes
from functools import cache

import torch
from torch.nn import functional

from colossal._src._native import library
from colossal._src.kernel.host_code import WIDEST_VECTORS, host_function

_PANEL = 32


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")),
    )


@cache
def has_packed_product(dtype: torch.dtype) -> bool:
    """Whether `packed_product` is fast on this processor: in float32 by vectors, in bfloat16 by tiles (AMX)."""
    if dtype not in {torch.float32, torch.bfloat16} or host_function("packed_product") is None:
        return False
    own = library("cpu/packed_product")
    return bool(own.colossal_has_vectors() if dtype == torch.float32 else own.colossal_has_tiles())


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight, (N, K), to panels; in bfloat16, K is even."""
    outputs, inputs = weight.shape
    rows = functional.pad(weight, (0, 0, 0, -outputs % _PANEL)).unflatten(0, (-1, _PANEL))
    if weight.dtype == torch.bfloat16:
        return rows.unflatten(2, (inputs // 2, 2)).transpose(1, 2).contiguous()
    return rows.transpose(1, 2).contiguous()


def to_rows(panels: torch.Tensor, outputs: int) -> torch.Tensor:
    """Copy panels of float32 to a weight, (N, K)."""
    return panels.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()


def packed_product(
    x: torch.Tensor, address: int, outputs: int, bias: torch.Tensor | None = None, level: int = WIDEST_VECTORS
) -> torch.Tensor:
    """Multiply rows by a weight in panels: `torch.nn.functional.linear` without gradients.

    Sums are in float32; a row's are the same whatever other rows there are.

    Args:
        x: Of shape (..., K), in float32, or in bfloat16 with K a multiple of 32.
        address: Of the panels, in the dtype of `x`.
        outputs: N.
        bias: Of shape (N,).
        level: 2 for the widest vectors of the processor, 1 for AVX2 at most, 0 for none; of no account in bfloat16.

    Returns:
        Of shape (..., N).
    """
    function = host_function("packed_product")
    assert function is not None
    rows, shift = x.contiguous(), None if bias is None else bias.float().contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    addresses = rows.data_ptr(), address, None if shift is None else shift.data_ptr(), out.data_ptr()
    function(_Product(*addresses, rows.numel() // x.shape[-1], x.shape[-1], outputs), x.dtype, level)
    return out
