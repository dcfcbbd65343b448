"""The gate of feed-forward layers: the SiLU of half of the features, times the other half."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import ctypes
from typing import Any

import torch
from torch.nn import functional

from colossal._src.kernel.host_code import CODES, WIDEST_VECTORS, host_function


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "grad", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width")),
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
        if _has_kernel(gate_up):
            return _run(gate_up, None, gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2), level)
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
        if _has_kernel(gate_up) and _has_kernel(grads[0]):
            return _run(gate_up, grads[0], found, ctx.level), None
        of_gate, of_up = found.chunk(2, 1)
        torch.mul(grads[0], functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=of_gate)
        return found, None


def _has_kernel(tensor: torch.Tensor) -> bool:
    """Whether own code reads a tensor: one with memory of the host."""
    is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return is_plain and tensor.dtype in CODES and host_function("gated_silu") is not None


def _run(gate_up: torch.Tensor, grad: torch.Tensor | None, out: torch.Tensor, level: int) -> torch.Tensor:
    function = host_function("gated_silu")
    assert function is not None
    gate_up, grad = gate_up.contiguous(), None if grad is None else grad.contiguous()
    addresses = gate_up.data_ptr(), None if grad is None else grad.data_ptr(), out.data_ptr()
    rows = _Rows(*addresses, len(gate_up), gate_up.shape[1] // 2)
    function(rows, out.dtype, level)
    return out
