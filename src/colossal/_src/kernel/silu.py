"""The gate of feed-forward layers: the SiLU of half of the features, times the other half, or of two tensors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import ctypes
from typing import Any

import torch
from torch.nn import functional

from colossal._src.kernel.host_code import CODES, WIDEST_VECTORS, host_function

_POINTERS = ("gate", "up", "values", "grad", "of_gate", "of_up", "factors", "of_factors")


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("num_rows", "width", "stride")),
    )


def gated_silu(gate_up: torch.Tensor, level: int = WIDEST_VECTORS) -> torch.Tensor:
    """Multiply the second half of the features by the SiLU of the first.

    In host memory that is one pass over them, and one backward, in float32 or float64. Gradients can be differentiated
    again.

    Args:
        gate_up: Of shape (N, 2 F).
        level: 2 for the widest vectors of the processor, 1 for AVX2 at most, 0 for none.

    Returns:
        Of shape (N, F).
    """
    result: Any = _GatedSilu.apply(gate_up, level)
    return result


class _GatedSilu(torch.autograd.Function):
    """Its gradients are written where they belong, instead of each by itself and then joined."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, level: int) -> torch.Tensor:
        ctx.level = level
        ctx.save_for_backward(gate_up)
        if has_gate_kernel(gate_up):
            values = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            write_gate(gate_up.contiguous(), values, level=level)
            return values
        gate, up = gate_up.chunk(2, 1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, 1)
        if torch.is_grad_enabled():  # which takes operations that can be differentiated again
            sigmoid = gate.sigmoid()
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            return torch.cat([grads[0] * up * slope, grads[0] * gate * sigmoid], 1), None
        found = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        if has_gate_kernel(gate_up) and has_gate_kernel(grads[0]):
            write_gate(gate_up.contiguous(), None, grad=grads[0].contiguous(), grads=found, level=ctx.level)
            return found, None
        of_gate, of_up = found.chunk(2, 1)
        torch.mul(grads[0], functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=of_gate)
        return found, None


def has_gate_kernel(tensor: torch.Tensor) -> bool:
    """Whether own code reads a tensor: one with memory of the host."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return is_plain and tensor.dtype in CODES and host_function("gated_silu") is not None


def write_gate(
    gate_up: torch.Tensor,
    values: torch.Tensor | None,
    *,
    grad: torch.Tensor | None = None,
    grads: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    of_factors: torch.Tensor | None = None,
    level: int = WIDEST_VECTORS,
) -> None:
    """Compute the values of `gated_silu`, and its gradients of those of the values, in one pass by own code.

    All are contiguous, and of one dtype that `has_gate_kernel` knows, but for the factors.

    Args:
        gate_up: Of shape (N, 2 F).
        values: Where to write the values, (N, F); None for nowhere.
        grad: Their gradient, (N, F); None for none. The values may be written over it.
        grads: Where to write then that of `gate_up`, (N, 2 F); it may be written over that.
        factors: What the values of each row are multiplied by, (N,), in float32, of float64 in float64; None for
            nothing.
        of_factors: Where to write then their gradients, (N,); None for nowhere.
        level: As of `gated_silu`.
    """
    function = host_function("gated_silu")
    assert function is not None
    rows, width = len(gate_up), gate_up.shape[1] // 2
    halves = (*gate_up.chunk(2, 1), values, grad, *((None, None) if grads is None else grads.chunk(2, 1)))
    addresses = (None if each is None else each.data_ptr() for each in (*halves, factors, of_factors))
    function(_Rows(*addresses, rows, width, 2 * width), gate_up.dtype, level)


def silu_product(gate: torch.Tensor, up: torch.Tensor, level: int = WIDEST_VECTORS) -> torch.Tensor:
    """Multiply a tensor by the SiLU of another in one pass by own code, without gradients.

    Args:
        gate: Of any shape, in a dtype that `has_gate_kernel` knows.
        up: Of its shape and dtype.
        level: As of `gated_silu`.

    Returns:
        Of their shape and dtype.
    """
    function = host_function("gated_silu")
    assert function is not None
    gate, up = gate.contiguous(), up.contiguous()
    values, width = torch.empty_like(gate), gate.shape[-1]
    addresses = gate.data_ptr(), up.data_ptr(), values.data_ptr()
    rows = _Rows(*addresses, None, None, None, None, None, gate.numel() // width, width, width)
    function(rows, gate.dtype, level)
    return values
