"""Feed-forward experts with a gated SiLU, on rows that are sorted by expert.

In shapes, E is the number of experts, N the number of rows of all of them, D their width and F that inside.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from typing import Any

import torch

from colossal._src.nn.moe.grouped_products import counts_of, gated_silu, grouped_linear, multiply_groups

# With fewer elements inside an expert, calling functions for it takes longer than its memory traffic.
_MIN_ELEMENTS = 2**16


def gated_feed_forward(
    rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Compute ``down(silu(gate(x)) * up(x))`` for the rows of each expert, which end at `ends`: (N, D) to (N, D).

    On the host, large experts are computed one after the other, so that what is inside one stays in the cache: only the
    products with (E, 2 F, D), of shape (N, 2 F), are kept for the backward pass.
    """
    is_plain = rows.dtype == gate_up.dtype == down.dtype and not torch.is_autocast_enabled(rows.device.type)
    if rows.device.type == "cpu" and is_plain and len(rows) * gate_up.shape[1] >= _MIN_ELEMENTS * len(gate_up):
        result: Any = _GatedFeedForward.apply(rows, gate_up, down, counts_of(ends))
        return result
    return grouped_linear(gated_silu(grouped_linear(rows, gate_up, ends)), down, ends)


class _GatedFeedForward(torch.autograd.Function):
    """One expert after the other, in buffers that all of them use."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        inner, out = rows.new_empty(len(rows), gate_up.shape[1]), torch.empty_like(rows)
        ctx.counts = counts
        ctx.save_for_backward(rows, gate_up, down, inner)
        activated, hidden = rows.new_empty(2, max(counts), down.shape[2])
        for x, product, result, up, back in zip(*_split(counts, rows, inner, out), gate_up, down, strict=True):
            torch.mm(x, up.T, out=product)
            torch.mm(_activate(product, activated, hidden), back.T, out=result)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, gate_up, down, inner = ctx.saved_tensors
        counts, needs = ctx.counts, ctx.needs_input_grad
        if torch.is_grad_enabled():  # which takes operations that can be differentiated again
            products = multiply_groups(rows, gate_up, counts)
            result = multiply_groups(gated_silu(products), down, counts)
            needed = [each for each, need in zip((rows, gate_up, down), needs, strict=False) if need]
            found = iter(torch.autograd.grad(result, needed, grads[0], create_graph=True))
            return *(next(found) if need else None for need in needs[:3]), None
        of_rows, of_gate_up, of_down = (
            torch.empty_like(each) if need else None for each, need in zip((rows, gate_up, down), needs, strict=False)
        )
        activated, hidden, of_hidden = rows.new_empty(3, max(counts), down.shape[2])
        of_inner, begin = rows.new_empty(max(counts), gate_up.shape[1]), 0
        for expert, (x, product, grad) in enumerate(zip(*_split(counts, rows, inner, grads[0]), strict=True)):
            number, end = len(x), begin + len(x)
            result = _activate(product, activated, hidden)
            if of_down is not None:
                torch.mm(grad.T, result, out=of_down[expert])
            of_result, of_product = of_hidden[:number], of_inner[:number]
            torch.mm(grad, down[expert], out=of_result)
            (gate, up), (of_gate, of_up) = product.chunk(2, 1), of_product.chunk(2, 1)
            torch.mul(of_result, activated[:number], out=of_up)
            torch.ops.aten.silu_backward.grad_input(of_result.mul_(up), gate, grad_input=of_gate)
            if of_rows is not None:
                torch.mm(of_product, gate_up[expert], out=of_rows[begin:end])
            if of_gate_up is not None:
                torch.mm(of_product.T, x, out=of_gate_up[expert])
            begin = end
        return of_rows, of_gate_up, of_down, None


def _split(counts: Sequence[int], *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return [each.split([*counts]) for each in tensors]


def _activate(product: torch.Tensor, activated: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Write the SiLU of the gate, and its product with the other half, into the first rows of buffers."""
    gate, up = product.chunk(2, 1)
    torch.ops.aten.silu.out(gate, out=activated[: len(product)])
    return torch.mul(activated[: len(product)], up, out=hidden[: len(product)])
