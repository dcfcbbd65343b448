# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Sums of gradients whose terms travel in 8 bits, with a scale for each block of them; sums are taken in float32.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433.
"""

from collections.abc import Callable, Iterator

import torch
from torch import distributed as dist

from colossal._src.comm.channel import all_gather_into
from colossal._src.comm.lost_peers import LostPeerGuard

BLOCK = 1024
"""How many elements have a scale in common."""

# In slices, as a float32 copy of an entire row would need a multiple of the row's memory.
_BLOCKS = 256
"""How many blocks of a row are widened to float32 at once."""

_EIGHT = torch.float8_e4m3fn
_SCALE_BYTES = torch.float32.itemsize


def fp8_nbytes(numel: int) -> int:
    """Return how many bytes are sent for so many elements."""
    return numel + -(-numel // BLOCK) * _SCALE_BYTES


def quantize_fp8(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Round numbers to 8 bits, the largest of a block to the largest that these can say."""
    count, numel = rows.shape
    packed = rows.new_empty(count, fp8_nbytes(numel), dtype=torch.uint8) if out is None else out
    scales = rows.new_empty(count, -(-numel // BLOCK), dtype=torch.float32)
    for start, end, blocks in _slices(numel):
        wide = rows.new_zeros(count, len(blocks) * BLOCK, dtype=torch.float32)
        wide[:, : end - start] = rows[:, start:end]
        by_block = wide.view(count, -1, BLOCK)
        largest = by_block.abs().amax(-1) / torch.finfo(_EIGHT).max
        # A block of zeros would become 0 / 0.
        largest.masked_fill_(largest == 0, 1.0)
        eight = by_block.div_(largest[..., None]).to(_EIGHT).view(torch.uint8)
        packed[:, start:end] = eight.view(count, -1)[:, : end - start]
        scales[:, blocks.start : blocks.stop] = largest
    packed[:, numel:] = scales.view(torch.uint8)
    return packed


def dequantize_fp8(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Read what `quantize_fp8` has written."""
    numbers = packed.new_empty(len(packed), numel, dtype=torch.float32)
    for start, end, part in _read(packed, numel):
        numbers[:, start:end] = part
    return numbers


def reduce_scatter_fp8(
    own: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor | None = None
) -> tuple[list[dist.Work], Callable[[], object], int]:
    """Begin to sum the ranks' tensors, each rank one shard, as `reduce_scatter_into` does in the dtype of the tensor.

    Communication: all_to_all, the group, one byte for each element and 4 for each block of 1024.
    """
    rows = buffer.view(dist.get_world_size(group), -1)
    shape = len(rows), fp8_nbytes(rows.shape[1])
    if scratch is None:
        scratch = buffer.new_empty(2 * shape[0] * shape[1], dtype=torch.uint8)
    outgoing, incoming = scratch.view(torch.uint8)[: 2 * shape[0] * shape[1]].view(2, *shape)
    work = dist.all_to_all_single(incoming, quantize_fp8(rows, outgoing), group=group, async_op=True)

    def finish() -> None:
        for start, end, numbers in _read(incoming, own.numel()):
            own[start:end] = numbers.sum(0)

    return [] if work is None else [work], finish, outgoing.nbytes


def _slices(numel: int) -> Iterator[tuple[int, int, range]]:
    """Yield the beginning and the end of parts that are short enough to be widened, and their blocks."""
    for start in range(0, numel, _BLOCKS * BLOCK):
        end = min(start + _BLOCKS * BLOCK, numel)
        yield start, end, range(start // BLOCK, -(-end // BLOCK))


def _read(packed: torch.Tensor, numel: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    count = len(packed)
    # The scales of a row begin at any byte, and only aligned memory can be viewed as float32.
    scales = packed[:, numel:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    for start, end, blocks in _slices(numel):
        padded = packed.new_zeros(count, len(blocks) * BLOCK)
        padded[:, : end - start] = packed[:, start:end]
        numbers = padded.view(_EIGHT).float().view(count, -1, BLOCK) * scales[:, blocks.start : blocks.stop, None]
        yield start, end, numbers.view(count, -1)[:, : end - start]


def all_reduce_fp8(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up over a group, the terms and then the sum in 8 bits: all ranks get the same bits.

    Communication: all_to_all and all_gather, the group, one byte for each element and 4 for each block of 1024.
    """
    size, numel = dist.get_world_size(group), tensor.numel()
    length = -(-max(numel, 1) // size)
    padded = tensor.new_zeros(size * length)
    padded[:numel] = tensor.reshape(-1)
    # The sum is only rounded to 8 bits once, when it is complete.
    own = padded.new_empty(length, dtype=torch.float32)
    works, finish, _ = reduce_scatter_fp8(own, padded, group)
    with LostPeerGuard():
        for work in works:
            work.wait()
    finish()
    shard = quantize_fp8(own[None])
    full = shard.new_empty(size, shard.shape[1])
    with LostPeerGuard():
        for work in all_gather_into(full, shard, group):
            work.wait()
    return dequantize_fp8(full, length).reshape(-1)[:numel].view(tensor.shape).to(tensor.dtype)
