"""The bytes of a tensor in a file: in blocks, each of which is checked by its digest."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self, final

import torch

from colossal._src.checkpoint_io.header import Header, Place, damaged, read_header
from colossal._src.tensor import Region
from colossal.errors import CheckpointError

BLOCK_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 20  # read and hashed before it leaves the cache of the core


@lru_cache(4096)
def split_blocks(region: Region, itemsize: int) -> tuple[Region, ...]:
    """Split a region along its first dimension into blocks of at most `BLOCK_BYTES`, where that is possible."""
    if not region.numel:
        return ()
    if not region.shape:
        return (region,)
    rows = max(1, BLOCK_BYTES * region.shape[0] // (region.numel * itemsize))
    return tuple(
        Region((region.start[0] + at, *region.start[1:]), (min(rows, region.shape[0] - at), *region.shape[1:]))
        for at in range(0, region.shape[0], rows)
    )


def contiguous_runs(region: Region, shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length in bytes of each contiguous run of a region, in the order of the tensor's elements."""
    inner = len(shape)
    while inner and region.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(at * stride for at, stride in zip(region.start, strides, strict=True))
    if inner <= 1:
        yield base * itemsize, region.numel * itemsize
        return
    length = region.shape[inner - 1] * strides[inner - 1] * itemsize
    outer = region.shape[: inner - 1]
    for number in range(math.prod(outer)):
        offset = base
        for dim in reversed(range(inner - 1)):
            number, index = divmod(number, outer[dim])  # noqa: PLW2901
            offset += index * strides[dim]
        yield offset * itemsize, length


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.reshape(-1).view(torch.uint8).numpy().data


def digest_of(place: Place, region: Region, content: memoryview) -> str:
    """Return the digest of a block: of its content, its place, and the tensor's name, dtype and shape."""
    import xxhash

    state = xxhash.xxh3_64(place.describe(region))
    state.update(content)
    return state.hexdigest()


def write_block(descriptor: int, data_start: int, place: Place, region: Region, content: memoryview) -> None:
    """Write a block to its place in a file."""
    done = 0
    for offset, length in contiguous_runs(region, place.shape, place.dtype.itemsize):
        chunk, at = content[done : done + length], data_start + place.start + offset
        while chunk:
            written = os.pwrite(descriptor, chunk, at)
            chunk, at = chunk[written:], at + written
        done += length


@final
@dataclass(frozen=True)
class SafeFile:
    """A safetensors file that is open for reading. Use it as a context manager."""

    path: Path  # the file
    header: Header  # what it holds
    data_start: int  # offset of the data that follows the header
    descriptor: int  # the open file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file and read its header."""
        header, data_start = read_header(path)
        descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return cls(path, header, data_start, descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, name: str, region: Region, out: torch.Tensor) -> None:
        """Read a region of a tensor, and check every block that overlaps it."""
        place = self.header.places[name]
        blocks = place.blocks or dict.fromkeys(split_blocks(Region.full(place.shape), place.dtype.itemsize))
        for block, digest in blocks.items():
            common = block.overlap(region)
            if not common.numel and region.numel:
                continue
            target = out[common.inside(region).slices]
            if common == block and _is_memory_of(target, place.dtype):
                self._read_block(place, block, digest, bytes_of(target))
            elif region.numel:
                buffer = torch.empty(block.shape, dtype=place.dtype, device="cpu")
                self._read_block(place, block, digest, bytes_of(buffer))
                target.copy_(buffer[common.inside(block).slices])

    def _read_block(self, place: Place, block: Region, digest: str | None, into: memoryview) -> None:
        import xxhash

        state = xxhash.xxh3_64(place.describe(block))
        done = 0
        for offset, length in contiguous_runs(block, place.shape, place.dtype.itemsize):
            at = self.data_start + place.start + offset
            for chunk in _read_chunks(into[done : done + length]):
                if _read_fully(self.descriptor, chunk, at) != len(chunk):
                    raise damaged(self.path, "the file ends too soon", place.name)
                if digest is not None:
                    state.update(chunk)
                at += len(chunk)
            done += length
        if digest is not None and state.hexdigest() != digest:
            raise CheckpointError(
                f"{damaged(self.path, 'its bytes do not fit the digest that was written with them', place.name)} "
                "What was read before it is in place already: do not go on without loading another checkpoint."
            )


def _read_chunks(content: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]


def _read_fully(descriptor: int, into: memoryview, at: int) -> int:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], at + done)
        if not count:
            break
        done += count
    return done


def _is_memory_of(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
