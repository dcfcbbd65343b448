"""Experts of Hugging Face whose weights are stacked, on rows that are in the order of the experts.

The forward method that transformers has for them, `grouped_mm`, takes rows in any order: it sorts and weighs them, and
adds up. Of what `dispatch` returns all of that is done.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

_NEEDED = ("config", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")


def multiplies_groups(experts: nn.Module, rows: torch.Tensor) -> bool:
    """Whether experts multiply the rows of each by its weights, by choice of the program, and on the host."""
    if rows.device.type != "cpu" or any(not hasattr(experts, name) for name in _NEEDED):
        return False
    chosen: Any = cast("Any", experts).config
    is_plain = not getattr(experts, "has_post_expert_norm", False)
    return is_plain and getattr(chosen, "_experts_implementation", None) == "grouped_mm"


def run_experts(experts: Any, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Run each expert on its rows, as the module's options say."""

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(experts, name)
        weight = weight.mT if experts.is_transposed else weight
        product = multiply_groups(x.to(weight.dtype), weight, counts)
        if not experts.has_bias:
            return product
        numbers = torch.tensor(counts, device=x.device)
        return product + getattr(experts, f"{name}_bias").repeat_interleave(numbers, 0, output_size=len(x))

    if experts.has_gate:
        hidden = experts._apply_gate(multiply("gate_up_proj", rows))  # noqa: SLF001 (what a class may define)
    else:
        hidden = experts.act_fn(multiply("up_proj", rows))
    return multiply("down_proj", hidden).to(rows.dtype)


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
