"""Reports replicas that differ when they are saved, and files that differ between the ranks that load them."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch

from colossal._src.checkpoint_io.index_and_names import listing
from colossal._src.comm import int64_digest
from colossal._src.tensor import FlatLayout, Layout, Region, RegionLayout, local_regions_of
from colossal.errors import CheckpointError
from colossal.logging import get_dist_logger

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class _Entry(Protocol):
    """What is asked of a tensor that is saved, or of a value that is none."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def value(self) -> Any: ...
    @property
    def layout(self) -> Layout | FlatLayout | RegionLayout | None: ...
    @property
    def is_buffer(self) -> bool: ...


def replica_checksums(entries: Sequence[_Entry], rank: int) -> dict[int, int]:
    """Sum up the bits of each region that other ranks hold too, under a digest of its name and place.

    Buffers are left out: each rank may compute its own, and a file has those of the first.
    """
    sums: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    for name, region, local, _ in _replicas(entries, rank):
        digests, bits = sums.setdefault(local.device, ([], []))
        digests.append(int64_digest(f"{name} {region}"))
        bits.append(_sum_of_bits(local))
    # one transfer for each device
    return {
        digest: total
        for digests, bits in sums.values()
        for digest, total in zip(digests, torch.stack(bits).tolist(), strict=True)
    }


def warn_of_different_replicas(entries: Sequence[_Entry], rank: int, checksums: Sequence[Mapping[int, int]]) -> None:
    """Name what differs, once: on the first rank that holds it."""
    names: list[str] = []
    holders: set[int] = set()
    for name, region, _, ranks in _replicas(entries, rank):
        digest = int64_digest(f"{name} {region}")
        if rank == min(ranks) and len({each[digest] for each in checksums if digest in each}) > 1:
            names.append(name)
            holders |= set(ranks)
    if names:
        get_dist_logger().warning(
            "Replicas of a parameter and of its optimizer states are equal on the ranks that hold them. Found other "
            f"values on some of the ranks {sorted(holders)} of {listing(dict.fromkeys(names))}: the checkpoint has "
            "those of one rank of each. Look for an update or a seed that depends on the rank, and for parameters that "
            "are changed outside of the optimizer."
        )


class WhatWasRead(NamedTuple):
    """What tells whether ranks have read the same files."""

    sample: str
    checksums: Mapping[int, int]

    @classmethod
    def of(cls, sample: str, names: AbstractSet[str], entries: Sequence[_Entry], rank: int) -> Self:
        """Describe a sample of the files, and the entries that they name: others may differ between ranks."""
        return cls(sample, replica_checksums([each for each in entries if not names.isdisjoint(each.names)], rank))


def refuse_different_files(read: Sequence[WhatWasRead], ranks: Sequence[int], checkpoint: str | Path) -> None:
    """Reject on all ranks that some have read other files, as from disks of their own, which replicas never mend."""
    first: dict[int, int] = {}
    others = [
        rank
        for rank, each in zip(ranks, read, strict=True)
        if each.sample != read[0].sample
        or any(first.setdefault(digest, total) != total for digest, total in each.checksums.items())
    ]
    if others:
        raise CheckpointError(
            f"All ranks load the same files. Found others on ranks {others} than on rank {ranks[0]} at {checkpoint}: "
            "the model now has values of both. Load from a file system that all nodes share, or copy one save to all."
        )


def _replicas(entries: Sequence[_Entry], rank: int) -> Iterator[tuple[str, Region, torch.Tensor, Sequence[int]]]:
    """The regions that this rank and others hold: name, region, local tensor and ranks."""
    for entry in entries:
        if entry.layout is None or entry.is_buffer or rank not in entry.layout.ranks:
            continue
        holders = {region: ranks for region, ranks in entry.layout.holders.items() if len(ranks) > 1}
        for region, local in local_regions_of(entry.value, rank) if holders else ():
            if region in holders:
                yield entry.names[0], region, local, holders[region]


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(-1).view(_INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)
