"""Ranges of flattened tensors: how ranks partition what optimizers hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from colossal._src.tensor.region import Region
from colossal.errors import PlanError


@final
@dataclass(frozen=True)
class FlatLayout:
    """Which rank holds which range of a tensor's elements, counted in the order of a contiguous tensor.

    Unlike a `Layout`, it splits anywhere, so that ranks get shards of equal size from tensors of any shape. The local
    shard of a rank is a tensor of one dimension.

    Args:
        shape: The shape of the full tensor.
        ranks: The global ranks that hold it.
        ranges: For each rank its first element and its end (exclusive); several ranks may hold the same range.

    Raises:
        PlanError: There is not one range for each rank, or one is not inside of the tensor.

    Example:
        >>> from colossal.tensor import FlatLayout
        >>> layout = FlatLayout((3, 4), ranks=(0, 1), ranges=((0, 6), (6, 12)))
        >>> [region.shape for region in layout.regions_of(0)]
        [(1, 4), (1, 2)]
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if len(self.ranks) != len(self.ranges) or any(not 0 <= a <= b <= size for a, b in self.ranges):
            raise PlanError(
                f"A flat layout has a range for each rank, within the {size} elements of its tensor. Found the ranks "
                f"{self.ranks} and the ranges {self.ranges}. Pass one range for each "
                "rank, and none that ends beyond the last element."
            )

    @cached_property
    def regions(self) -> dict[int, tuple[Region, ...]]:
        """The regions that the range of each rank consists of, in the order of its elements."""
        ranges = zip(self.ranks, self.ranges, strict=True)
        return {rank: tuple(_regions_in(self.shape, *range_)) for rank, range_ in ranges}

    @cached_property
    def holders(self) -> dict[Region, tuple[int, ...]]:
        """The ranks that hold each region."""
        holders: dict[Region, tuple[int, ...]] = {}
        for rank, regions in self.regions.items():
            for region in regions:
                holders[region] = (*holders.get(region, ()), rank)
        return holders

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Find what a rank holds.

        Args:
            rank: A global rank.

        Returns:
            The regions that its range consists of, in the order of its elements.

        Raises:
            PlanError: The rank holds no shard of the tensor.
        """
        if rank not in self.regions:
            raise PlanError(
                f"Only ranks {self.ranks} hold shards of the tensor. Found rank {rank}. Ask one of them for its region."
            )
        return self.regions[rank]


def _regions_in(shape: Sequence[int], begin: int, end: int) -> list[Region]:
    """Split a range of elements into regions: the rest of a row, complete rows, and the beginning of one."""
    if begin >= end:
        return []
    if not shape:
        return [Region((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # within one row
        return _in_row(shape, last, begin - last * inner, end - last * inner)
    regions = _in_row(shape, first - 1, begin - (first - 1) * inner, inner) if begin < first * inner else []
    if first < last:
        regions.append(Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return regions + (_in_row(shape, last, 0, end - last * inner) if last * inner < end else [])


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[Region]:
    return [Region((row, *region.start), (1, *region.shape)) for region in _regions_in(shape[1:], begin, end)]
