"""The header of a safetensors file, and what ours says beyond the format: digests, and plain data.

The format is that of https://huggingface.co/docs/safetensors: 8 bytes with the length of a JSON text, the text, then
the tensors one after the other. The metadata of our files carries a digest for each block of each tensor. It covers
the tensor's name, dtype and shape too, so that no change of a file goes unseen. Other readers pass it over.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, final

import torch

from colossal._src.tensor import Region
from colossal.errors import CheckpointError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
_MARK, _DIGESTS, _PLAIN = "colossal", "colossal.digests", "colossal.plain"
_OWN = (_MARK, _DIGESTS, _PLAIN)
# a damaged length must not make a reader take all of the memory
_MAX_HEADER_BYTES = 1 << 30
# as long as any digest, so that the length of the header is known before them
EMPTY_DIGEST = "0" * 16


@final
@dataclass(frozen=True)
class Place:
    """Where a tensor is stored in a file, and how its bytes are checked."""

    name: str  # the name of the tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the data of the file
    # the digest of each block, in hexadecimal; without blocks nothing is checked
    blocks: dict[Region, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return Region.full(self.shape).numel * self.dtype.itemsize

    def describe(self, region: Region) -> bytes:
        """Return what a block's digest begins with: a block stands for its tensor and its place in it."""
        return f"{self.name}|{CODES[self.dtype]}|{self.shape}|{region.start}|{region.shape}|".encode()


@final
@dataclass(frozen=True)
class Header:
    """What a safetensors file holds, and where."""

    places: dict[str, Place]  # the tensors by name, in the order of the file
    plain: Any = None  # plain data in addition to the tensors, as JSON holds it; None for none
    save_id: str = ""  # what all files of one save have in common; empty in a file that others wrote

    @classmethod
    def from_tensors(
        cls,
        tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], Iterable[Region]]],
        plain: Any,
        save_id: str,
    ) -> Self:
        """Give each tensor its place: larger elements first, as readers that map a file need it."""
        places: dict[str, Place] = {}
        start = 0
        for name, dtype, shape, blocks in sorted(tensors, key=lambda each: -each[1].itemsize):
            places[name] = Place(name, dtype, shape, start, dict.fromkeys(blocks, EMPTY_DIGEST))
            start += places[name].num_bytes
        return cls(places, plain, save_id)

    @property
    def data_bytes(self) -> int:
        """Size of the data that follows the header."""
        return sum(place.num_bytes for place in self.places.values())

    def encode(self) -> bytes:
        """Return the first bytes of the file; as many of them whatever the digests are."""
        plain = json.dumps(self.plain, separators=(",", ":"))
        digests = {
            place.name: [[*region.start, *region.shape, digest] for region, digest in place.blocks.items()]
            for place in self.places.values()
        }
        own = {"version": 1, "save": self.save_id, "plain": _digest_of(plain)}
        content: dict[str, Any] = {
            "__metadata__": {
                "format": "pt",
                _MARK: json.dumps(own),
                _DIGESTS: json.dumps(digests, separators=(",", ":")),
                _PLAIN: plain,
            }
        }
        for place in self.places.values():
            offsets = [place.start, place.start + place.num_bytes]
            content[place.name] = {"dtype": CODES[place.dtype], "shape": place.shape, "data_offsets": offsets}
        text = json.dumps(content, separators=(",", ":")).encode()
        # the format aligns the data that follow to 8 bytes
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> tuple[Header, int]:
    """Read the header of a safetensors file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        # a file that is shorter than that gets a length which is refused below
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise damaged(path, f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        # of two equal names, json would drop one in silence
        header = _parse(json.loads(text, object_pairs_hook=_unique))
    except CheckpointError:
        raise
    except Exception as error:
        raise damaged(path, f"an invalid header, {type(error).__name__}: {error}") from error
    expected = 8 + length + header.data_bytes
    if size != expected:
        raise damaged(path, f"{size} bytes where the header promises {expected}")
    return header, 8 + length


def damaged(path: Path, found: str, tensor: str | None = None) -> CheckpointError:
    """Return the error of a file that is not as it was written."""
    what = f"the tensor {tensor!r} of {path}" if tensor else str(path)
    return CheckpointError(
        f"Loading needs a safetensors file as it was written. Found {what} damaged: {found}. "
        "Copy it again from where it came, or load an earlier checkpoint."
    )


def _parse(content: Mapping[str, Any]) -> Header:
    metadata = content.get("__metadata__", {})
    own = [key for key in (_MARK, _DIGESTS, _PLAIN) if key in metadata]
    if any(_looks_like_ours(key, text) for key, text in metadata.items()) and len(own) != len(
        (_MARK, _DIGESTS, _PLAIN)
    ):
        raise ValueError("some of the entries that guard the content are missing")
    mark = json.loads(metadata[_MARK]) if own else {}
    plain = metadata[_PLAIN] if own else "null"
    if own and _digest_of(plain) != mark["plain"]:
        raise ValueError("the plain data do not fit their digest")
    digests = json.loads(metadata[_DIGESTS]) if own else None
    places = _parse_places({name: item for name, item in content.items() if name != "__metadata__"}, digests)
    return Header(places, json.loads(plain), mark.get("save", ""))


def _looks_like_ours(key: str, text: str) -> bool:
    """Whether an entry of the metadata is one of ours, even if its key is damaged."""
    return any(len(key) == len(name) and sum(map(str.__ne__, key, name)) <= len(name) // 2 for name in _OWN) or (
        '"save"' in text and '"version"' in text
    )


def _parse_places(content: Mapping[str, Any], digests: Mapping[str, Any] | None) -> dict[str, Place]:
    places: dict[str, Place] = {}
    start = 0
    for name, item in sorted(content.items(), key=lambda each: each[1]["data_offsets"]):
        shape = tuple(item["shape"])
        if not all(type(length) is int for length in shape):
            raise ValueError(f"the shape of the tensor {name!r} is {item['shape']!r}, not a list of integers")
        blocks = _parse_blocks(digests[name], len(shape)) if digests is not None else {}
        place = Place(name, _DTYPES[item["dtype"]], shape, start, blocks)
        if item["data_offsets"] != [start, start + place.num_bytes] or any(length < 0 for length in shape):
            raise ValueError(f"the tensor {name!r} does not start where the previous one ends")
        if digests is not None and sum(region.numel for region in blocks) != Region.full(shape).numel:
            raise ValueError(f"the blocks of the tensor {name!r} do not cover it")
        places[name] = place
        start += place.num_bytes
    return places


def _parse_blocks(rows: Iterable[list[Any]], dims: int) -> dict[Region, str]:
    return {Region(tuple(row[:dims]), tuple(row[dims:-1])): row[-1] for row in rows}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _digest_of(text: str) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(text.encode())


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


def block_digest(place: Place, region: Region, content: memoryview) -> str:
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
                # the entire block, as its digest is one of all its bytes
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
