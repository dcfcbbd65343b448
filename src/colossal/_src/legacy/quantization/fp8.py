"""Products of matrices, numbers and sums in 8-bit floating point, as functions."""

from typing import Any, Literal

import torch
from torch import distributed as dist
from torch.func import functional_call

from colossal._src import comm
from colossal._src.amp import FP8Linear, quantize_fp8
from colossal._src.legacy.notice import superseded
from colossal.errors import ConfigError, UnsupportedError

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""The dtype of each format."""


def cast_to_fp8(
    inp: torch.Tensor,
    fp8_format: Literal["e4m3", "e5m2"] = "e4m3",
    per_channel_scale: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a tensor to 8-bit floating point.

    Args:
        inp: Any shape; with `per_channel_scale` a matrix.
        fp8_format: How many bits the exponent and the mantissa have.
        per_channel_scale: A scale for each row, instead of one for all.
        out: Where the values are written, of the shape of `inp`, in 8 bits.

    Returns:
        The values, and their scale, of shape (), or (rows, 1): `inp` is about the one times the other.

    Raises:
        ConfigError: There is no such format.

    Example:
        >>> import torch
        >>> from colossal.legacy.quantization import cast_from_fp8, cast_to_fp8
        >>> cast_from_fp8(*cast_to_fp8(torch.tensor([1.0, -2.0])), torch.float32)
        tensor([ 1., -2.])
    """
    superseded("colossal.quantization.fp8.cast_to_fp8", "colossal.amp.quantize_fp8(tensor, torch.float8_e4m3fn)")
    if fp8_format not in FORMATS:
        raise ConfigError(f"8 bits have the format 'e4m3' or 'e5m2'. Found {fp8_format!r}. Pass one of these.")
    dtype = FORMATS[fp8_format]
    if per_channel_scale:
        rows = [quantize_fp8(row, dtype) for row in inp]
        values, scale = (torch.stack(each) for each in zip(*rows, strict=True))
        scale = scale[:, None]
    else:
        values, scale = quantize_fp8(inp, dtype)
    return (values if out is None else out.copy_(values)), scale


def cast_from_fp8(
    inp: torch.Tensor,
    scale_inv: torch.Tensor,
    ret_type: torch.dtype,
    per_channel_scale: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read what `cast_to_fp8` has rounded.

    Args:
        inp: The values in 8 bits.
        scale_inv: Their scale.
        ret_type: The dtype of the result.
        per_channel_scale: Accepted as documented: the scale says it.
        out: Where the result is written.

    Returns:
        The tensor.

    Example:
        See `cast_to_fp8`.

        >>> from colossal.legacy.quantization import cast_from_fp8
        >>> cast_from_fp8.__name__
        'cast_from_fp8'
    """
    del per_channel_scale
    wide = (inp.float() * scale_inv).to(ret_type)
    return wide if out is None else out.copy_(wide)


@torch.no_grad()
def all_reduce_fp8(
    tensor: torch.Tensor,
    fp8_format: Literal["e4m3", "e5m2"] = "e4m3",
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Add a tensor up over ranks, in place, sending 8 bits of each element.

    Args:
        tensor: The same shape on all ranks.
        fp8_format: Only ``"e4m3"``, with a scale for each block of elements.
        op: The sum or the mean.
        group: The ranks; by default all.
        async_op: Only False.

    Raises:
        UnsupportedError: An argument is something else.

    Communication: all_to_all and all_gather, the group, one byte for each element and 4 for each block of 1024.

    Example:
        >>> import torch
        >>> from colossal.legacy.quantization import all_reduce_fp8
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     tensor = torch.full((4,), 2.0)
        ...     all_reduce_fp8(tensor)
        ...     return tensor.tolist()
        >>> run_threads(program, 2)[0]
        [4.0, 4.0, 4.0, 4.0]
    """
    superseded("colossal.quantization.fp8.all_reduce_fp8", "fp8_communication=True of a plugin")
    if fp8_format != "e4m3" or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or async_op:
        raise UnsupportedError(
            "Sums and means are sent as 'e4m3', and waited for. Found "
            f"fp8_format={fp8_format!r}, op={op}, async_op={async_op}. Leave these out."
        )
    found = group or dist.group.WORLD
    assert found is not None
    total = comm.all_reduce_fp8(tensor, found)
    tensor.copy_(total / dist.get_world_size(found) if op == dist.ReduceOp.AVG else total)


def linear_fp8(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 (the documented name)
    """Multiply by a weight in 8-bit floating point, forward and backward, and add a bias.

    Args:
        input: (..., in).
        weight: (out, in).
        bias: (out,).

    Returns:
        (..., out), in the type of the input, or of autocast.

    Example:
        >>> import torch
        >>> from colossal.legacy.quantization import linear_fp8
        >>> linear_fp8(torch.ones(2, 16), torch.ones(16, 16))[0, 0].item()
        16.0
    """
    superseded("colossal.quantization.fp8.linear_fp8", "Booster(mixed_precision='fp8')")
    layer = FP8Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return functional_call(layer, given, (input,))
