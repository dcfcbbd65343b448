"""Attention of some queries to some keys, with what it takes to put several of them together.

Softmax over all keys is a weighted mean of softmaxes over some: the weights are the sums of exponentials, whose
logarithms each block returns.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

# [Note: kernels that also return the logarithms]
# torch chooses among these for scaled_dot_product_attention, by the device, its capability, the dtype and the sizes.
# Its public function keeps the logarithms to itself, so that they are called here by their own names. What cuDNN can
# compute, flash attention can as well. Where torch chooses none of them, the scores are computed as a matrix.
_ATEN: Any = torch.ops.aten
_FLASH, _EFFICIENT, _OF_DEVICE = (
    SDPBackend.FLASH_ATTENTION.value,
    SDPBackend.EFFICIENT_ATTENTION.value,
    SDPBackend.OVERRIDEABLE.value,
)
_CHOICES = {_FLASH: _FLASH, SDPBackend.CUDNN_ATTENTION.value: _FLASH, _EFFICIENT: _EFFICIENT, _OF_DEVICE: _OF_DEVICE}
_EFFICIENT_ROWS = 32  # the logarithms of memory-efficient attention are padded to a multiple of it


@final
@dataclass
class PartialAttention:
    """The attention of queries to the keys that have been seen so far."""

    out: torch.Tensor  # (batch, heads, queries, features), in float32 or float64
    lse: torch.Tensor  # the logarithm of the sum of exponentials of each query, (batch, heads, queries)

    @classmethod
    def empty(cls, query: torch.Tensor) -> "PartialAttention":
        """Return what is known before the first key."""
        # Every block of keys rescales what there is already: half precision would round it each time.
        dtype = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
        return cls(torch.zeros_like(query, dtype=dtype), lse)

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the attention to more keys."""
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
    """Compute the attention of some queries to some keys."""
    if mask is None and query.is_cpu:
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)  # noqa: SLF001 (see the note)
    if mask is None and (kernel := _choose(query, key, value, is_causal)):
        return _run(kernel, query, key, value, scale, is_causal)
    scores = _scores(query, key, scale, is_causal, mask)
    lse = scores.logsumexp(-1)
    # A query that sees none of these keys has -inf in both terms, whose difference is not a number.
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
    """Compute what some keys contribute to the gradients."""
    if mask is None and query.is_cpu:
        backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 (see the note)
        return backward(grad, query, key, value, out, lse, 0.0, is_causal, scale=scale)
    if mask is None and (kernel := _choose(query, key, value, is_causal)):
        return _run_backward(kernel, grad, query, key, value, out, lse, scale, is_causal)
    scores = _scores(query, key, scale, is_causal, mask)
    # The logarithms count the keys of all ranks, so these are weights of the full softmax.
    weights = (scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1)).exp()
    grad, out = grad.to(weights.dtype), out.to(weights.dtype)
    grad_scores = weights * (grad @ value.to(weights.dtype).mT - (grad * out).sum(-1, keepdim=True)) * scale
    grads = grad_scores @ key.to(weights.dtype), grad_scores.mT @ query.to(weights.dtype), weights.mT @ grad
    first, second, third = (each.to(query.dtype) for each in grads)
    return first, second, third


def _choose(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> int | None:
    return _CHOICES.get(torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal))  # noqa: SLF001 (see the note)


def _run(
    kernel: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if kernel == _FLASH:
        found = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)  # noqa: SLF001 (see the note)
    elif kernel == _EFFICIENT:
        forward = _ATEN._scaled_dot_product_efficient_attention  # noqa: SLF001 (see the note)
        found = forward(query, key, value, None, True, 0.0, is_causal, scale=scale)
    else:
        forward = _ATEN._scaled_dot_product_fused_attention_overrideable  # noqa: SLF001 (see the note)
        found = forward(query, key, value, None, 0.0, is_causal, scale=scale)
    # Without the padding of memory-efficient attention.
    return found[0], found[1][:, :, : query.shape[2]]


def _run_backward(
    kernel: int,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    unused = torch.zeros((), dtype=torch.int64, device="cpu")  # the state of random numbers, of which none are drawn
    own, lengths = (grad, query, key, value), (None, None, query.shape[2], key.shape[2])
    if kernel == _FLASH:
        backward = _ATEN._scaled_dot_product_flash_attention_backward  # noqa: SLF001 (see the note)
        return backward(*own, out, lse, *lengths, 0.0, is_causal, unused, unused, scale=scale)
    wanted = (True, True, True, False)
    if kernel == _EFFICIENT:
        backward = _ATEN._scaled_dot_product_efficient_attention_backward  # noqa: SLF001 (see the note)
        # Infinity makes the weights of the padded rows zero.
        padded = pad(lse, (0, -lse.shape[2] % _EFFICIENT_ROWS), value=torch.inf)
        return backward(*own, None, out, padded, unused, unused, 0.0, wanted, is_causal, scale=scale)[:3]
    backward = _ATEN._scaled_dot_product_fused_attention_overrideable_backward  # noqa: SLF001 (see the note)
    found = backward(*own, None, wanted, out, lse, *lengths, 0.0, is_causal, unused, unused, scale=scale)
    return found[0], found[1], found[2]


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, is_causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) @ key.to(dtype).mT) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        mask = seen if mask is None else mask & seen
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)
