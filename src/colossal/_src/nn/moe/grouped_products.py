"""Products of rows that are sorted by expert, and the weights of their experts.

In shapes, E is the number of experts, N the number of rows of all of them, D their width and F that inside.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16  # of rows, for the grouped product


def grouped_linear(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the rows of each expert, which end at `ends`, by its weights, of shape (outputs, inputs)."""
    device = rows.device.type
    rows, weights = autocast(rows, weights)
    is_aligned = all(size * rows.element_size() % _ALIGNED_BYTES == 0 for size in weights.shape[1:])
    if device != "cpu" and len(rows) and is_aligned and rows.dtype == weights.dtype and rows.dtype in _GROUPED:
        product = functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends.to(rows.device, torch.int32))
    else:
        product = multiply_groups(rows, weights, counts_of(ends))
    if bias is None:
        return product
    numbers = ends.diff(prepend=ends.new_zeros(1)).to(rows.device)
    return product + bias.repeat_interleave(numbers, 0, output_size=len(rows))


def autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast factors to the dtype of autocast, which does not know the grouped product."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return [*tensors]
    return [each.to(torch.get_autocast_dtype(device)) for each in tensors]


def counts_of(ends: torch.Tensor) -> list[int]:
    """How many rows each expert has; the host waits if `ends` is on an accelerator."""
    found: list[int] = ends.tolist()
    return [end - begin for begin, end in pairwise([0, *found])]


def multiply_groups(rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix: (N, in) and (E, out, in) to (N, out)."""
    result: Any = _GroupedLinear.apply(rows, weight, tuple(counts))
    return result


class _GroupedLinear(torch.autograd.Function):
    """A product for each expert, written where it belongs: nothing is joined or added up."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.counts = counts
        ctx.save_for_backward(rows, weight)
        out = rows.new_empty(len(rows), weight.shape[1])
        for x, matrix, product in zip(rows.split(counts), weight, out.split(counts), strict=True):
            torch.mm(x, matrix.T, out=product)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        parts = [each.split(ctx.counts) for each in (grads[0], rows)]
        if torch.is_grad_enabled():  # which takes operations that can be differentiated again
            of_rows = torch.cat([grad @ matrix for grad, matrix in zip(parts[0], weight, strict=True)])
            return of_rows, torch.stack([grad.T @ x for grad, x in zip(*parts, strict=True)]), None
        of_rows = torch.empty_like(rows) if needs_rows else None
        if of_rows is not None:
            for grad, matrix, product in zip(parts[0], weight, of_rows.split(ctx.counts), strict=True):
                torch.mm(grad, matrix, out=product)
        of_weight = torch.empty_like(weight) if needs_weight else None
        if of_weight is not None:
            for grad, x, product in zip(*parts, of_weight, strict=True):
                torch.mm(grad.T, x, out=product)
        return of_rows, of_weight, None
