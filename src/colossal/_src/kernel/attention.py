"""Attention of new tokens to keys and values in pages, in own code for host memory."""

import ctypes
from typing import NamedTuple, final

import torch

from colossal._src.kernel.host_code import CODES, WIDEST_VECTORS, host_function

_POINTERS = ("query", "keys", "values", "out", "slots", "sequences", "ends")
_NUMBERS = ("slots_stride", "num_rows", "num_heads", "num_kv_heads", "width", "value_width", "key_stride")
PAGED_DTYPES = frozenset(CODES)
"""Of queries, keys and values."""


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_NUMBERS, "value_stride", "window")),
        ("scale", ctypes.c_double),
    )


@final
class PagedTokens(NamedTuple):
    """Where the tokens of a batch are, which has one new token of each row.

    Attributes:
        slots: Of sequences, (sequences, length) and contiguous: where the keys and values of each token are.
        sequences: The sequence of each row, (rows,).
        ends: How many tokens it has, the new one among them, (rows,).
    """

    slots: torch.Tensor
    sequences: torch.Tensor
    ends: torch.Tensor


def has_paged_attention(device: torch.device) -> bool:
    """Whether `paged_attention` runs here: on host memory, if its code could be built."""
    return device.type == "cpu" and host_function("paged_attention") is not None


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: PagedTokens,
    *,
    scale: float,
    window: int | None = None,
    level: int = WIDEST_VECTORS,
) -> torch.Tensor:
    """Attend from one token of each row to all tokens of its sequence, or to the last ones.

    Args:
        query: Of shape (rows, heads, width); of `PAGED_DTYPES`, as keys and values.
        keys: Of all slots, (slots, kv_heads, width), contiguous.
        values: Of all slots, (slots, kv_heads, value_width), contiguous.
        tokens: Where the tokens of each row are.
        scale: What products of queries and keys are multiplied by.
        window: How many of the last tokens count; None for all.
        level: 2 for the widest vectors of the processor, 1 for AVX2 at most, 0 for none.

    Returns:
        Of shape (rows, heads, value_width).
    """
    function = host_function("paged_attention")
    assert function is not None
    assert query.dtype == keys.dtype == values.dtype  # or the kernel would read other memory
    query = query.contiguous()
    rows, heads, width = query.shape
    _, kv_heads, value_width = values.shape
    out = query.new_empty(rows, heads, value_width)
    addresses = (each.data_ptr() for each in (query, keys, values, out, *tokens))
    numbers = (tokens.slots.shape[1], rows, heads, kv_heads, width, value_width, kv_heads * width)
    batch = _Batch(*addresses, *numbers, kv_heads * value_width, window or 0, scale)
    function(batch, query.dtype, level)
    return out
