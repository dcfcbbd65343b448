"""Attention that reads keys and values where pages have them, for batches of one new token a row, on CPUs.

[Note: what a model notices]
Models of transformers call an attention function by the name that their configuration has, with what the cache returned
and with a mask. For such a batch the engine puts a name of its own into the configuration; the cache returns tensors
that know their pages; and there is no mask where it would only hide padding and what is outside of a window. A model
that does anything else with keys or values, or has another mask, gets gathered tensors, and the function of `sdpa`.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from colossal._src.kernel import PAGED_DTYPES, PagedTokens, has_paged_attention, paged_attention

_NAME, _REPLACED = "colossal_pages", "sdpa"
_CHANGING = ("position_bias", "softcap")
"""Keywords that change what attention computes."""


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of a batch are, and the columns that gathered ones have, aligned at their ends."""

    tokens: PagedTokens
    num_columns: int

    def mask(self, num_columns: int) -> torch.Tensor:
        """Return which of the last columns are tokens, (rows, 1, 1, columns)."""
        columns = torch.arange(self.num_columns - num_columns, self.num_columns, device=self.tokens.ends.device)
        return (columns >= self.num_columns - self.tokens.ends[:, None])[:, None, None]


_BATCH: ContextVar[PagedBatch | None] = ContextVar("batch", default=None)


class InPages(torch.Tensor):
    """Keys or values of all tokens of a batch; an operation on them gathers these first."""

    pages: torch.Tensor
    window: int | None
    gathered: Callable[[], torch.Tensor]

    @classmethod
    def of(
        cls, states: torch.Tensor, pages: torch.Tensor, window: int | None, gathered: Callable[[], torch.Tensor]
    ) -> "InPages":
        """Stand for the tokens of a batch, whose new ones are `states`, in pages of shape (slots, heads, head_dim)."""
        found = states.as_subclass(cls)
        found.pages, found.window, found.gathered = pages, window, gathered
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gather what an operation is about to read."""
        args, kwargs = tree_map_only(InPages, lambda each: each.gathered(), (args, kwargs or {}))
        return func(*args, **kwargs)


def configs_to_replace(model: nn.Module, device: torch.device) -> list[Any]:
    """Find the configurations that say which attention the model computes; none if it cannot be that of pages."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    is_able = getattr(model, "_supports_attention_backend", False) and dtypes <= PAGED_DTYPES
    if not is_able or not has_paged_attention(device):
        return []
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    kinds = {config._attn_implementation for config in configs.values()}  # noqa: SLF001 (as models read it)
    return list(configs.values()) if kinds == {_REPLACED} else []


@contextmanager
def attention_in_pages(configs: list[Any], batch: PagedBatch | None) -> Generator[None]:
    """Let a forward attend to a batch in pages; to any other as it does."""
    if batch is None:
        yield
        return
    token = _BATCH.set(batch)
    for config in configs:
        config._attn_implementation_internal = _NAME  # noqa: SLF001 (the property checks each time what we know)
    try:
        yield
    finally:
        _BATCH.reset(token)
        for config in configs:
            config._attn_implementation_internal = _REPLACED  # noqa: SLF001 (as above)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    batch = _BATCH.get()
    assert batch is not None
    is_plain = attention_mask is None and all(kwargs.get(name) is None for name in _CHANGING)
    if is_plain and type(key) is InPages and type(value) is InPages and _are_alike(query, key.pages, value.pages):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        found = paged_attention(query.squeeze(2), key.pages, value.pages, batch.tokens, scale=scale, window=key.window)
        return found.unsqueeze(1), None
    key, value = (each.gathered() if isinstance(each, InPages) else each for each in (key, value))
    if attention_mask is None:
        attention_mask = batch.mask(key.shape[2])
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def _are_alike(*tensors: torch.Tensor) -> bool:
    """Whether they have one dtype, which the kernel takes: under autocast those of a model may have others."""
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) == 1 and dtypes <= PAGED_DTYPES


def _make_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _hides_only_what_pages_leave_out(kwargs.get("mask_function")) else sdpa_mask(*args, **kwargs)


def _hides_only_what_pages_leave_out(function: Any) -> bool:
    """Whether a mask is causal, or causal inside of a window; transformers composes these of functions."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    is_both = getattr(function, "__name__", "") == "and_mask" and len(cells) == 1
    parts = cells[0] if is_both else (function,)
    names = (getattr(part, "__qualname__", "") for part in parts if part is not causal_mask_function)
    return all(name.startswith("sliding_window_overlay.") for name in names)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _make_mask)
