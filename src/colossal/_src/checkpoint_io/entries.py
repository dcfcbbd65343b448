"""What is saved: named tensors and their layouts, split into files and assigned to ranks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch

from colossal._src.checkpoint_io.blocks import split_blocks
from colossal._src.tensor import FlatLayout, Layout, Region, RegionLayout, layout_of, local_regions_of
from colossal.errors import CheckpointError, ConfigError

MIB = 1024**2


@final
@dataclass(frozen=True)
class Entry:
    """One tensor, or one value that is not a tensor, under one or several names."""

    names: tuple[str, ...]  # its names; the one that a format without aliases keeps comes first
    value: Any  # the tensor, which may be a DTensor, or the value; None for a tensor that other ranks hold
    # which rank holds which shard of the tensor; None for what is not a tensor
    layout: Layout | FlatLayout | RegionLayout | None
    dtype: torch.dtype | None  # the dtype of the tensor; None for what is not a tensor

    @classmethod
    def of(cls, names: Sequence[str], value: Any, ranks: Sequence[int]) -> "Entry":
        """Describe a value."""
        if not isinstance(value, torch.Tensor):
            return cls(tuple(names), value, None, None)
        layout = layout_of(value, ranks)
        if not set(layout.ranks) <= set(ranks):
            raise CheckpointError(
                f"All ranks that hold a shard of a tensor must save and load together. Found {names[0]!r} on ranks "
                f"{layout.ranks}, and only ranks {tuple(ranks)} here. Use the booster's own save and load, or "
                "CheckpointIO(ProcessGroupIO())."
            )
        return cls(tuple(names), value, layout, value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self.layout.shape if self.layout else ()

    @property
    def itemsize(self) -> int:
        """Size of an element of the tensor in bytes."""
        return self.dtype.itemsize if self.dtype else 0

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_like(self) -> str:
        """What must be the same on all ranks that have some of it."""
        return f"{self.names} {self.dtype or type(self.value)} {self.shape}"

    @property
    def fingerprint(self) -> str:
        """What is the same on ranks that may speak for each other."""
        return f"{self.is_like} {self.layout!r}"

    def without_value(self) -> Self:
        """Leave the tensor out: what other ranks need to know of it."""
        return self if self.layout is None else replace(self, value=None)


@final
@dataclass(frozen=True)
class BlockWrite:
    """A block that one rank writes."""

    file: int  # number of the file
    name: str  # the name of the tensor
    block: Region  # the region of the tensor
    rank: int  # the global rank that writes it
    tensor: torch.Tensor | None  # the values of the region, on their device; None on other ranks


def plan_files(entries: Iterable[Entry], max_bytes: float) -> list[list[Entry]]:
    """Fill one file after the other, in order; an entry that is larger than a file gets one of its own."""
    if max_bytes <= 0:
        raise ConfigError(
            f"The size of a shard must be positive. Found size_per_shard={max_bytes / MIB:g} MB. The default is 1024."
        )
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if files[-1] and filled + entry.num_bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.num_bytes
    return files


def assign_blocks(files: Sequence[Sequence[Entry]], own_rank: int) -> list[BlockWrite]:
    """Choose for each block a rank that writes it: one that holds it, and has the least to write so far.

    All ranks come to the same result by themselves.
    """
    load: dict[int, int] = {}
    block_writes: list[BlockWrite] = []
    for number, entries in enumerate(files):
        for entry in entries:
            assert entry.layout is not None, "values that are no tensors have no blocks"
            itemsize = entry.itemsize
            own = dict(local_regions_of(entry.value, own_rank)) if own_rank in entry.layout.ranks else {}
            for region, holders in entry.layout.holders.items():
                for block in split_blocks(region, itemsize):
                    rank = min(holders, key=lambda each: (load.get(each, 0), each))
                    load[rank] = load.get(rank, 0) + block.numel * itemsize
                    part = own[region].detach()[block.inside(region).slices] if rank == own_rank else None
                    block_writes.append(BlockWrite(number, entry.names[0], block, rank, part))
    return block_writes
