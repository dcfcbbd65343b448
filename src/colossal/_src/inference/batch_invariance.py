"""Forward passes whose bits of a token do not depend on how many others are computed with it.

[Note: one row at a time]
A matrix product may round another way if it has more rows, and attention if it has more columns, also where they are
masked. So a token is multiplied by weights alone, and attends to those that it sees, which makes a forward pass of many
tokens equal to one of each, at the cost of those. All other operations of a model see one row in any case.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from colossal.errors import UnsupportedError

_BATCHED = 3  # dimensions of a batch of matrices


@contextmanager
def batch_invariant() -> Generator[None]:
    """Open a context in which a model computes each token by itself, bit by bit as if it were alone.

    An engine with `batch_invariant=True` that generates with a boosted model computes in it. A training forward pass in
    it gives the same log-probabilities of the same tokens, exactly, with gradients: see `logprob_gap`. It is as slow as
    one pass for each token.

    It holds for models whose layers are `torch.nn.functional.linear` or `torch.addmm`, and whose attention is
    `torch.nn.functional.scaled_dot_product_attention`, in float32 or float64 on CPUs, and on accelerators whose kernels
    are deterministic; without dropout.

    Raises:
        UnsupportedError: The model multiplies batches of matrices, such as in attention of its own.

    Source: He et al., "Defeating Nondeterminism in LLM Inference", 2025,
    https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference.

    Example:
        >>> import torch
        >>> from colossal.inference import batch_invariant
        >>> linear, x = torch.nn.Linear(64, 64), torch.randn(5, 64)
        >>> with batch_invariant():
        ...     print(torch.equal(linear(x)[3], linear(x[3:4])[0]))
        True
    """
    with _BatchInvariance():
        yield


class _BatchInvariance(TorchFunctionMode):
    """Replaces products of many rows by those of one."""

    def __torch_function__(
        self, func: Any, _types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch row by row, if that matters."""
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))


def _linear(func: Any, x: torch.Tensor, *weights: Any, **named: Any) -> torch.Tensor:
    return _by_rows(x, lambda row: func(row, *weights, **named))


def _addmm(func: Any, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **named: Any) -> torch.Tensor:
    return _by_rows(x, lambda row: func(bias, row, weight, **named))


def _matmul(func: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if other.dim() < _BATCHED:
        return _by_rows(x, lambda row: func(row, other))
    if x.shape[-1] > 1:  # else nothing is summed, as in rotary embeddings
        return _refuse(func)
    return func(x, other)


def _by_rows(x: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Multiply each row, (1, in), which is copied so that no kernel sees another alignment."""
    rows = [multiply(row.clone()) for row in x.reshape(-1, 1, x.shape[-1]).unbind()]
    return torch.cat(rows).unflatten(0, x.shape[:-1]) if rows else multiply(x)


def _attention(
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Let each query attend to the keys that its mask leaves."""
    batch, heads, num_queries, _ = query.shape
    visible = _visible(attn_mask, is_causal, (batch, num_queries, key.shape[2]), query.device)
    bias = attn_mask if attn_mask is not None and attn_mask.dtype != torch.bool else None
    if bias is not None:
        bias = bias.expand(batch, -1, num_queries, -1)
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    samples: list[torch.Tensor] = []
    for sample in range(batch):
        rows: list[torch.Tensor] = []
        for index in range(num_queries):
            columns = visible[sample, index].nonzero()[:, 0]
            if not len(columns):  # of padding
                rows.append(query.new_zeros(1, heads, 1, value.shape[-1]))
                continue
            rows.append(
                func(
                    query[sample : sample + 1, :, index : index + 1].clone(),
                    key[sample : sample + 1].index_select(2, columns),
                    value[sample : sample + 1].index_select(2, columns),
                    None if bias is None else bias[sample : sample + 1, :, index : index + 1].index_select(3, columns),
                    **options,
                )
            )
        samples.append(torch.cat(rows, dim=2))
    return torch.cat(samples)


def _visible(
    mask: torch.Tensor | None, is_causal: bool, shape: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    """Which keys each query attends to, (batch, queries, keys)."""
    if mask is None:
        found = torch.ones(shape[1:], dtype=torch.bool, device=device)
        return (found.tril() if is_causal else found).expand(shape)
    found = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return found.any(1).expand(shape)


def _refuse(func: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise UnsupportedError(
        "In the batch-invariant mode of a boosted model, attention is torch's scaled_dot_product_attention, of which "
        f"each token is computed alone. Found {func.__name__} of batches of matrices. Load the model with "
        "attn_implementation='sdpa' if it has that, or leave batch_invariant out."
    )


_RULES: Mapping[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
    torch.addmm: _addmm,
    torch.mm: _matmul,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.bmm: _refuse,
    torch.baddbmm: _refuse,
    torch.Tensor.bmm: _refuse,
    torch.Tensor.baddbmm: _refuse,
    torch.einsum: _refuse,
}
