"""The header of a safetensors file, and what ours says beyond the format: digests, and plain data.

The format is that of https://huggingface.co/docs/safetensors: 8 bytes with the length of a JSON text, the text, then
the tensors one after the other. The metadata of our files carries a digest for each block of each tensor. It covers
the tensor's name, dtype and shape too, so that no change of a file goes unseen. Other readers pass it over.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
_MAX_HEADER_BYTES = 1 << 30
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
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> tuple[Header, int]:
    """Read the header of a safetensors file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise damaged(path, f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
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
