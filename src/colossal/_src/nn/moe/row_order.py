"""Rows in the order of the experts that they are for, and back.

In shapes, T is the number of tokens, D their width, and K the number of experts that a token goes to.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import torch
from torch.nn import functional


@final
@dataclass(frozen=True)
class RowOrder:
    """An order of rows, several of which may be copies of one token."""

    index: torch.Tensor  # which row stands at each place
    inverse: torch.Tensor  # at which place each row stands
    num_copies: int = 1

    @classmethod
    def by(cls, keys: torch.Tensor, num_copies: int = 1) -> tuple[torch.Tensor, Self]:
        """Sort rows by a key; return the sorted keys as well."""
        keys, index = keys.sort(stable=True)
        inverse = torch.empty_like(index)
        inverse[index] = torch.arange(len(index), device=index.device)
        return keys, cls(index, inverse, num_copies)

    @classmethod
    def by_expert(cls, chosen: torch.Tensor, num_experts: int) -> tuple[Self, torch.Tensor]:
        """Sort copies of tokens by their experts, of shape (T, K); return where the rows of each expert end as well."""
        keys, order = cls.by(chosen.flatten(), chosen.shape[1])
        if keys.is_meta:  # all experts get as many
            return order, torch.arange(1, num_experts + 1, device="cpu") * len(keys) // num_experts
        return order, torch.searchsorted(keys, torch.arange(num_experts, device=keys.device), right=True)

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Which token each row is a copy of."""
        return self.index if self.num_copies == 1 else self.index // self.num_copies

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy each token as often as it goes out, and put the copies in order."""
        result: Any = _Take.apply(rows, self)
        return result

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring rows into their first order, and add up the copies of each token."""
        result: Any = _Restore.apply(rows, self)
        return result

    def add_weighted(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Bring rows into their first order, and add up those of each token by its weights, of shape (T, K).

        Sums are in the dtype of the weights, if that is longer, and the result in that of the rows.
        """
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        result: Any = _AddWeighted.apply(rows.to(dtype), weights.to(dtype), self)
        return result.to(rows.dtype)


class _Take(torch.autograd.Function):
    """A gather whose gradient is one as well, instead of a scatter that adds in any order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return rows.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Restore.apply(grads[0], ctx.order), None


class _Restore(torch.autograd.Function):
    """The gradient of `_Take`, whose gradient that is in turn."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return rows.index_select(0, order.inverse) if order.num_copies == 1 else _sum_of_bags(rows, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Take.apply(grads[0], ctx.order), None


class _AddWeighted(torch.autograd.Function):
    """A gather that adds up; its gradients are in the order of the rows, so that nothing is sorted back for them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return _sum_of_bags(rows, order, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights, _ = ctx.needs_input_grad
        order: RowOrder = ctx.order
        of_rows = of_weights = None
        taken = order.take(grads[0])
        if needs_weights:
            products = torch.linalg.vecdot(taken, rows)
            of_weights = products.index_select(0, order.inverse).view(weights.shape)
        if needs_rows:
            factors = weights.flatten().index_select(0, order.index).unsqueeze(1)
            of_rows = taken * factors if torch.is_grad_enabled() else taken.mul_(factors)
        return of_rows, of_weights, None


def _sum_of_bags(rows: torch.Tensor, order: RowOrder, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Gather and add up in one pass: the rows of a token are a bag of an embedding."""
    bags = order.inverse.view(-1, order.num_copies)
    return functional.embedding_bag(bags, rows, mode="sum", per_sample_weights=weights)
