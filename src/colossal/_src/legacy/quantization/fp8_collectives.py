"""Collectives whose tensors travel in 8 bits, each with a scale, by their older names."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import distributed as dist

from colossal._src.comm import Channel, PendingComm
from colossal._src.legacy.mesh import grid_of_group
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.quantization.fp8 import FORMATS, cast_from_fp8, cast_to_fp8
from colossal.errors import ShapeError

Format = Literal["e4m3", "e5m2"]
_SCALE_BYTES = torch.float32.itemsize


@torch.no_grad()
def all_gather_fp8(
    output_list: Sequence[torch.Tensor],
    input_: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    fp8_format: Format = "e5m2",
    async_op: bool = False,
) -> PendingComm | None:
    """Give all ranks the tensors of all, each rounded to 8 bits.

    Args:
        output_list: A tensor for each rank, which is written.
        input_: This rank's tensor, of the same shape on all ranks.
        group: The ranks; by default all.
        fp8_format: How many bits the exponent and the mantissa have.
        async_op: Return a handle, of a collective that is over.

    Raises:
        ConfigError: There is no such format.
        ShapeError: There are not as many outputs as ranks.

    Communication: all_gather, the group, one byte for each element and 4 for each tensor.
    """
    superseded("colossal.quantization.fp8.all_gather_fp8", "fp8_communication=True of a plugin")
    channel = _channel(group, output_list)
    packed = channel.all_gather(_pack(input_, fp8_format)[None], 0)
    for output, each in zip(output_list, packed, strict=True):
        _unpack(each, fp8_format, output)
    return PendingComm() if async_op else None


@torch.no_grad()
def reduce_scatter_fp8(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    fp8_format: Format = "e5m2",
    async_op: bool = False,
) -> PendingComm | None:
    """Add tensors up over ranks, each rank one of them; the terms are rounded to 8 bits, and added in float32.

    Args:
        output: What this rank gets.
        input_list: A term for each rank, of the shape of `output`.
        group: The ranks; by default all.
        fp8_format: How many bits the exponent and the mantissa have.
        async_op: Return a handle, of a collective that is over.

    Raises:
        ConfigError: There is no such format.
        ShapeError: There are not as many terms as ranks.

    Communication: all_to_all, the group, one byte for each element and 4 for each term.
    """
    superseded("colossal.quantization.fp8.reduce_scatter_fp8", "fp8_communication=True of a plugin")
    terms = [torch.empty_like(output, dtype=torch.float32) for _ in input_list]
    _exchange(terms, input_list, _channel(group, input_list), fp8_format)
    output.copy_(torch.stack(terms).sum(0))
    return PendingComm() if async_op else None


@torch.no_grad()
def all_to_all_fp8(
    output_list: Sequence[torch.Tensor],
    input_list: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    fp8_format: Format = "e5m2",
    async_op: bool = False,
) -> PendingComm | None:
    """Send each rank a tensor, rounded to 8 bits, and receive one from each.

    Args:
        output_list: What arrives from each rank, of the shape that this rank sends.
        input_list: What each rank gets.
        group: The ranks; by default all.
        fp8_format: How many bits the exponent and the mantissa have.
        async_op: Return a handle, of a collective that is over.

    Raises:
        ConfigError: There is no such format.
        ShapeError: There are not as many tensors as ranks.

    Communication: all_to_all, the group, one byte for each element and 4 for each tensor.
    """
    superseded("colossal.quantization.fp8.all_to_all_fp8", "colossal.comm.all_to_all")
    _exchange(output_list, input_list, _channel(group, output_list, input_list), fp8_format)
    return PendingComm() if async_op else None


@torch.no_grad()
def all_to_all_single_fp8(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 (the documented name)
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    fp8_format: Format = "e5m2",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> PendingComm | None:
    """Send each rank rows of a tensor, rounded to 8 bits, and receive rows from each.

    Args:
        output: What arrives, in rank order; (rows, ...).
        input: What is sent, in rank order; (rows, ...).
        output_split_sizes: How many rows arrive from each rank; by default as many from each.
        input_split_sizes: How many rows each rank gets; by default as many.
        fp8_format: How many bits the exponent and the mantissa have.
        group: The ranks; by default all.
        async_op: Return a handle, of a collective that is over.

    Raises:
        ConfigError: There is no such format.
        ShapeError: The rows do not divide evenly, or the sizes are not as many as ranks.

    Communication: all_to_all, the group, one byte for each element and 4 for each rank.
    """
    superseded("colossal.quantization.fp8.all_to_all_single_fp8", "colossal.comm.all_to_all")
    channel = _channel(group)
    outputs, inputs = _rows(output, output_split_sizes, channel.size), _rows(input, input_split_sizes, channel.size)
    _exchange(outputs, inputs, channel, fp8_format)
    return PendingComm() if async_op else None


def _channel(group: dist.ProcessGroup | None, *lists: Sequence[torch.Tensor]) -> Channel:
    """A channel between the ranks, for each of which the lists have a tensor."""
    channel = Channel("tp", grid_of_group(group or dist.group.WORLD))
    for tensors in lists:
        if len(tensors) != channel.size:
            raise ShapeError(
                f"There is a tensor for each of {channel.size} ranks. Found {len(tensors)}. Pass {channel.size}."
            )
    return channel


def _rows(tensor: torch.Tensor, sizes: Sequence[int] | None, number: int) -> Sequence[torch.Tensor]:
    """View the rows for each rank."""
    if sizes is None:
        sizes = [len(tensor) // number] * number
    if len(sizes) != number or sum(sizes) != len(tensor):
        raise ShapeError(
            f"The rows of a tensor are split over {number} ranks. Found {len(tensor)} rows and the sizes "
            f"{[*sizes]}. Pass {number} sizes that add up to the number of rows."
        )
    return tensor.split([*sizes])


def _exchange(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], channel: Channel, fp8_format: Format
) -> None:
    sent = [_pack(each, fp8_format) for each in inputs]
    lengths = [each.numel() + _SCALE_BYTES for each in outputs]
    arrived = channel.exchange_rows(torch.cat(sent), [len(each) for each in sent], lengths)
    for output, packed in zip(outputs, arrived.split(lengths), strict=True):
        _unpack(packed, fp8_format, output)


def _pack(tensor: torch.Tensor, fp8_format: Format) -> torch.Tensor:
    """The bytes of the values, then of their scale, so that both are one message."""
    if not tensor.numel():  # of nothing there is no largest value
        return torch.zeros(_SCALE_BYTES, dtype=torch.uint8, device=tensor.device)
    values, scale = cast_to_fp8(tensor, fp8_format)
    return torch.cat([values.flatten().view(torch.uint8), scale.float().reshape(1).view(torch.uint8)])


def _unpack(packed: torch.Tensor, fp8_format: Format, out: torch.Tensor) -> None:
    # The scale begins at any byte, and only aligned memory can be viewed as float32.
    scale = packed[-_SCALE_BYTES:].clone().view(torch.float32)
    values: Any = packed[:-_SCALE_BYTES].view(FORMATS[fp8_format]).view(out.shape)
    out.copy_(cast_from_fp8(values, scale, torch.float32))
