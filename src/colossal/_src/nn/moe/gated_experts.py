"""Gated experts, from tokens to the sums of their results in one operation that keeps little for its gradients.

[Note: what gated experts keep]
Operations one after the other keep copies of the tokens for each expert, what its first product makes, what the gate
makes of that, and the results, before they are added up. Here only what the first product makes is kept: the tokens are
copied again, the gate is computed again with its gradients, in one pass, and the weight of a row multiplies what the
gate makes, so that its gradient needs no result. The gradient of the first product is written over it, unless the graph
stays for another pass, or hooks saw what was saved: those may keep that very tensor, as hooks that look at activations.

In shapes, E is the number of experts, T that of tokens, K that of the experts that each goes to, N the number of rows
of all experts, D their width and F that inside.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from typing import Any, final

import torch

from colossal._src.kernel import gated_silu, has_gate_kernel, write_gate
from colossal._src.nn.moe.grouped_products import autocast, counts_of, grouped_linear
from colossal._src.nn.moe.row_order import RowOrder
from colossal._src.tensor import has_saved_tensor_hooks


def gated_feed_forward(
    rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Run experts of two products and a gate, the SiLU of half of the features, on rows that are sorted by expert.

    Args:
        rows: Of shape (N, D).
        gate_up: The first weights, (E, 2 F, D).
        down: The second, (E, D, F).
        ends: Where the rows of each expert end, (E,).

    Returns:
        Of shape (N, D).
    """
    return _run(rows, gate_up, down, None, _Places(ends))


def gated_sums(
    tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Run such experts on tokens, and add up the results of each by its weights.

    Sums are in the dtype of the weights, if that is longer; in host memory in float32 at least. The result is in that
    of the tokens.

    Args:
        tokens: Of shape (T, D).
        chosen: The experts of each, (T, K).
        weights: Their weights, (T, K).
        gate_up: As of `gated_feed_forward`, as is the next.
        down: The second weights.

    Returns:
        Of shape (T, D).
    """
    order, ends = RowOrder.by_expert(chosen, len(gate_up))
    return _run(tokens, gate_up, down, weights, _Places(ends, order))


@final
class _Places:
    """Where the rows of each expert are: next to each other, or copies of tokens in an order."""

    def __init__(self, ends: torch.Tensor, order: RowOrder | None = None) -> None:
        self.ends, self.order = ends, order  # `ends` are those of the rows of each expert

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copy tokens to rows."""
        return tokens if self.order is None else self.order.take(tokens)

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Add up the rows of each token."""
        return rows if self.order is None else self.order.restore(rows.to(_dtype_of_sums(rows))).to(rows.dtype)

    def factors(self, weights: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor | None:
        """Bring weights into the order of the rows, of shape (N,)."""
        if weights is None or self.order is None:
            return None
        return weights.flatten().index_select(0, self.order.index).to(_dtype_of_sums(tokens))

    def weights(self, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bring such factors back into the order of the weights, of shape (T, K)."""
        assert self.order is not None
        return factors.index_select(0, self.order.inverse).view(-1, self.order.num_copies).to(dtype)


def _run(
    tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor | None, places: _Places
) -> torch.Tensor:
    tokens, gate_up, down = experts = autocast(tokens, gate_up, down)
    dtype = _dtype_of_sums(tokens)
    has_sums = weights is None or torch.promote_types(weights.dtype, dtype) == dtype
    has_code = len({each.dtype for each in experts}) == 1 and all(map(has_gate_kernel, experts))
    run: Any = _GatedExperts.apply if has_sums and has_code else _one_after_the_other
    return run(tokens, gate_up, down, weights, places)


def _dtype_of_sums(tokens: torch.Tensor) -> torch.dtype:
    """In which own code computes the gate."""
    return torch.float64 if tokens.dtype == torch.float64 else torch.float32


def _one_after_the_other(
    tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor | None, places: _Places
) -> torch.Tensor:
    """The same in operations that can be differentiated twice."""
    ends, order = places.ends, places.order
    rows = grouped_linear(gated_silu(grouped_linear(places.take(tokens), gate_up, ends)), down, ends)
    return rows if weights is None or order is None else order.add_weighted(rows, weights)


class _GatedExperts(torch.autograd.Function):
    """See [Note: what gated experts keep]."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor | None,
        places: _Places,
    ) -> torch.Tensor:
        counts, rows, factors = counts_of(places.ends), places.take(tokens), places.factors(weights, tokens)
        inner, values = (rows.new_empty(len(rows), each) for each in (gate_up.shape[1], down.shape[2]))
        _multiply(rows, gate_up.mT.unbind(), inner, counts)
        write_gate(inner, values, factors=factors)
        out = torch.empty_like(rows) if places.order is None else rows  # which are then a copy
        _multiply(values, down.mT.unbind(), out, counts)
        ctx.counts, ctx.places, ctx.hooks_may_keep = counts, places, has_saved_tensor_hooks()
        ctx.save_for_backward(tokens, gate_up, down, weights, inner)
        return places.restore(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tokens, gate_up, down, weights, inner = ctx.saved_tensors
        places, counts, needed = ctx.places, ctx.counts, ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            # which takes operations that can be differentiated again, of views: what a router computes of the tokens
            # depends on them, and its gradient is not this function's to add
            given: Any = [None if each is None else each.view_as(each) for each in (tokens, gate_up, down, weights)]
            out = _one_after_the_other(*given, places=places)
            wanted: Any = [each for each, needs in zip(given, needed, strict=True) if needs]
            found = iter(torch.autograd.grad(out, wanted, grads, create_graph=True))
            return *(next(found) if needs else None for needs in needed), None
        of_gate_up, of_down = (
            torch.empty_like(each, memory_format=torch.contiguous_format) if needs else None
            for each, needs in zip((gate_up, down), needed[1:3], strict=True)
        )
        factors = places.factors(weights, tokens)
        of_factors = torch.empty_like(factors) if factors is not None and needed[3] else None
        grad = places.take(grads[0]).contiguous()
        of_inner = torch.empty_like(inner) if ctx.hooks_may_keep or _is_kept_for_another_pass() else inner
        values = grad.new_empty(len(grad), down.shape[2])
        _multiply(grad, down.unbind(), values, counts)  # their gradients, over which they are then written
        write_gate(inner, values, grad=values, grads=of_inner, factors=factors, of_factors=of_factors)
        if of_down is not None:
            _multiply_transposed(grad, values, of_down, counts)
        rows, of_rows = tokens, None
        if places.order is not None:  # then `grad` is a copy, which has done its part
            rows = of_rows = grad
            torch.index_select(tokens, 0, places.order.tokens, out=rows)
        if of_gate_up is not None:
            _multiply_transposed(of_inner, rows, of_gate_up, counts)
        of_tokens = None
        if needed[0]:
            of_rows = torch.empty_like(rows) if of_rows is None else of_rows
            _multiply(of_inner, gate_up.unbind(), of_rows, counts)
            of_tokens = places.restore(of_rows)
        of_weights = None if of_factors is None else places.weights(of_factors, weights.dtype)
        return of_tokens, of_gate_up, of_down, of_weights, None


def _is_kept_for_another_pass() -> bool:
    """Whether the backward pass that runs leaves what was saved for it to another one (``retain_graph``)."""
    backend: Any = torch._C  # noqa: SLF001 (no public function says it; torch's compiler asks this one too)
    return backend._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 (as above)


def _multiply(rows: torch.Tensor, matrices: Sequence[torch.Tensor], out: torch.Tensor, counts: list[int]) -> None:
    """Multiply the rows of each expert by its matrix."""
    for x, matrix, product in zip(rows.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(x, matrix, out=product)


def _multiply_transposed(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, counts: list[int]) -> None:
    """Sum up over the rows of each expert: (N, A) and (N, B) to (E, A, B)."""
    for x, y, product in zip(left.T.split(counts, 1), right.split(counts), out, strict=True):
        torch.mm(x, y, out=product)
