"""Attention of some queries to some keys, with what it takes to put several of them together.

Softmax over all keys is a weighted mean of softmaxes over some: the weights are the sums of exponentials, whose
logarithms each block returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

# What scaled_dot_product_attention runs; only these return the logarithms of the sums.
_KERNELS: Mapping[str, Callable[..., Any]] = {
    "cpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,  # noqa: SLF001 (no public name)
    "cpu_backward": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,  # noqa: SLF001 (no public name)
    "cuda": torch.ops.aten._scaled_dot_product_flash_attention,  # noqa: SLF001 (no public name)
    "cuda_backward": torch.ops.aten._scaled_dot_product_flash_attention_backward,  # noqa: SLF001 (no public name)
}
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MULTIPLE = 8


@final
@dataclass
class Partial:
    """The attention of queries to the keys that have been seen so far.

    Args:
        out: (batch, heads, queries, features), in float32 or float64.
        lse: The logarithm of the sum of exponentials of each query, (batch, heads, queries).
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def nothing(cls, query: torch.Tensor) -> "Partial":
        """Return what is known before the first key."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
        return cls(torch.zeros_like(query, dtype=dtype), lse)

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the attention to more keys.

        Args:
            rows: The queries.
            out: Their attention to these keys.
            lse: The logarithms of their sums.
        """
        before = self.lse[:, :, rows]
        total = torch.logaddexp(before, lse.to(before.dtype))
        known = total.masked_fill(total.isneginf(), 0)  # a query that has seen no key yet has an output of zero
        self.out[:, :, rows] *= (before - known).exp().unsqueeze(-1)
        self.out[:, :, rows] += out * (lse - known).exp().unsqueeze(-1)
        self.lse[:, :, rows] = total


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of some queries to some keys.

    Args:
        query: (batch, heads, queries, features).
        key: (batch, heads, keys, features).
        value: (batch, heads, keys, features).
        scale: Factor of products of queries and keys.
        is_causal: Whether query i sees keys 0 to i only.
        mask: True for what is seen; it broadcasts to (batch, heads, queries, keys).

    Returns:
        The output, and the logarithm of each query's sum of exponentials; minus infinity for one that sees no key.
    """
    if mask is None and query.device.type == "cpu":
        return _KERNELS["cpu"](query, key, value, 0.0, is_causal, scale=scale)
    if mask is None and _is_for_flash(query):
        found = _KERNELS["cuda"](query, key, value, 0.0, is_causal, scale=scale)
        return found[0], found[1]
    scores = _scores(query, key, scale, is_causal, mask)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1)).exp()
    return weights.to(value.dtype) @ value, lse


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what some keys contribute to the gradients.

    Args:
        grad: Of the output of all keys.
        query: See `attend`, as are the keys and values.
        key: These keys.
        value: Their values.
        out: The output of all keys.
        lse: The logarithm of each query's sum over all keys.
        scale: See `attend`.
        is_causal: See `attend`.
        mask: See `attend`.

    Returns:
        The gradients of query, key and value; that of the query is a summand.
    """
    arguments: tuple[Any, ...] = grad, query, key, value, out, lse
    if mask is None and query.device.type == "cpu":
        return _KERNELS["cpu_backward"](*arguments, 0.0, is_causal, scale=scale)
    if mask is None and _is_for_flash(query):
        unused = torch.zeros((), dtype=torch.int64)  # the state of random numbers, of which none are drawn
        ends = (None, None, query.shape[2], key.shape[2], 0.0, is_causal, unused, unused)
        return _KERNELS["cuda_backward"](*arguments, *ends, scale=scale)
    scores = _scores(query, key, scale, is_causal, mask)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1)).exp()
    grad, out = grad.to(weights.dtype), out.to(weights.dtype)
    grad_scores = weights * (grad @ value.to(weights.dtype).mT - (grad * out).sum(-1, keepdim=True)) * scale
    grads = grad_scores @ key.to(weights.dtype), grad_scores.mT @ query.to(weights.dtype), weights.mT @ grad
    first, second, third = (each.to(query.dtype) for each in grads)
    return first, second, third


def _is_for_flash(query: torch.Tensor) -> bool:
    return query.device.type == "cuda" and query.dtype in _FLASH_DTYPES and query.shape[-1] % _FLASH_MULTIPLE == 0


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, is_causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) @ key.to(dtype).mT) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        mask = seen if mask is None else mask & seen
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)
