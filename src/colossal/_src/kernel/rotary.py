"""Rotary position embeddings of queries and keys without gradients, in own code for host memory."""

import ctypes

import torch

from colossal._src.kernel.host_code import WIDEST_VECTORS, host_function


class _Heads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("num_heads", "row_stride", "head_stride", "token_stride")),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, _Heads) for name in ("queries", "keys")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("num_rows", "length", "width", "row_stride", "token_stride")),
    )


def rotate_heads(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, level: int = WIDEST_VECTORS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate heads whose first half of numbers is the partner of the other, as `apply_rotary_pos_emb` of a Llama does.

    It is computed in float32; in bfloat16 each product and their sum are rounded, as by operations one by one.

    Args:
        query: Of shape (rows, heads, length, width), of `FUSED_DTYPES`; numbers of a head follow each other.
        key: The same, of as many heads or fewer.
        cos: Of shape (rows, length, width) or (1, length, width), in the same dtype.
        sin: Of the shape and strides of `cos`.
        level: 2 for the widest vectors of the processor, 1 for AVX2 at most, 0 for none.

    Returns:
        Both, of their shapes; in memory all heads of a token follow each other.
    """
    function = host_function("rotary")
    assert function is not None
    rows, _, length, width = query.shape
    cos = cos.expand(rows, length, width)
    outputs: list[torch.Tensor] = []
    records: list[_Heads] = []
    for x in (query, key):
        out = x.new_empty(rows, length, x.shape[1], width)
        records.append(_Heads(x.data_ptr(), out.data_ptr(), x.shape[1], *x.stride()[:3]))
        outputs.append(out.transpose(1, 2))
    batch = _Batch(*records, cos.data_ptr(), sin.data_ptr(), rows, length, width, *cos.stride()[:2])
    function(batch, query.dtype, level)
    return outputs[0], outputs[1]
