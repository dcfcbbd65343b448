"""Rectangular index ranges of tensors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

from colossal.errors import PlanError


@final
@dataclass(frozen=True, order=True)
class Region:
    """A rectangular index range of a tensor.

    Args:
        start: First index along each dimension.
        shape: Length along each dimension.

    Example:
        >>> from colossal.tensor import Region
        >>> Region((0, 2), (4, 3)).overlap(Region((2, 0), (4, 4)))
        Region(start=(2, 2), shape=(2, 2))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Self:
        """Cover a tensor.

        Args:
            shape: The shape of the tensor.

        Returns:
            The region of all its elements.
        """
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the region from the full tensor."""
        return tuple(slice(at, at + length) for at, length in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Region") -> "Region":
        """Find the intersection of two regions of one tensor.

        Args:
            other: The other region.

        Returns:
            Their common region; without elements if there is none.
        """
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        return Region(start, tuple(max(0, end - at) for at, end in zip(start, ends, strict=True)))

    def inside(self, outer: "Region") -> "Region":
        """Count from the start of another region instead of from that of the tensor.

        Args:
            outer: A region that contains this one.

        Returns:
            The same elements, as a region of what `outer` selects.
        """
        return Region(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)


@final
@dataclass(frozen=True)
class RegionLayout:
    """Which rank holds which regions of a tensor.

    Args:
        shape: The shape of the full tensor.
        ranks: The global ranks that hold it.
        regions: The regions of each rank; several ranks may hold the same region, otherwise regions do not overlap.

    Raises:
        PlanError: There are not as many lists of regions as ranks.

    Example:
        >>> from colossal.tensor import Region, RegionLayout
        >>> upper, lower = Region((0, 0), (1, 4)), Region((1, 0), (2, 4))
        >>> RegionLayout((3, 4), (0, 1), ((upper,), (lower,))).regions_of(1)
        (Region(start=(1, 0), shape=(2, 4)),)
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    regions: tuple[tuple[Region, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.regions):
            raise PlanError(
                f"A region layout has one list of regions per rank. Found {len(self.regions)} lists for the ranks "
                f"{self.ranks}. Pass one list for each rank."
            )

    @classmethod
    def merged(cls, shape: tuple[int, ...], layouts: Iterable[Mapping[Region, tuple[int, ...]]]) -> Self:
        """Put together what several groups of ranks hold of one tensor.

        Replicas may be sharded differently: of two shardings that contradict each other, the first counts.

        Args:
            shape: The shape of the full tensor.
            layouts: The ranks that hold each region, as each group knows it.

        Returns:
            Which rank holds which regions; ranks whose regions do not count have none.

        Raises:
            PlanError: The regions do not cover the tensor.

        Example:
            >>> from colossal.tensor import Region, RegionLayout
            >>> left, right = Region((0,), (2,)), Region((2,), (1,))
            >>> RegionLayout.merged((3,), [{left: (0,)}, {right: (1,)}, {left: (2,)}]).holders[left]
            (0, 2)
        """
        missing = Region.full(shape).numel
        holders: dict[Region, tuple[int, ...]] = {}
        for layout in layouts:
            new = sum(region.numel for region in layout if region not in holders)
            if new > missing:
                continue
            missing -= new
            for region, ranks in layout.items():
                holders[region] = tuple(dict.fromkeys((*holders.get(region, ()), *ranks)))
        if missing:
            raise PlanError(
                f"Regions cover their full tensor of the shape {shape}. Found that {missing} elements are in none. "
                "Ask all ranks that hold a shard of it."
            )
        ranks = sorted({rank for each in holders.values() for rank in each})
        regions = tuple(tuple(region for region, held in holders.items() if rank in held) for rank in ranks)
        return cls(shape, tuple(ranks), regions)

    @cached_property
    def holders(self) -> dict[Region, tuple[int, ...]]:
        """The ranks that hold each region with elements."""
        holders: dict[Region, tuple[int, ...]] = {}
        for rank, regions in zip(self.ranks, self.regions, strict=True):
            for region in regions:
                if region.numel:
                    holders[region] = (*holders.get(region, ()), rank)
        return holders

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Find what a rank holds.

        Args:
            rank: A global rank.

        Returns:
            Its regions.

        Raises:
            PlanError: The rank holds no shard of the tensor.
        """
        if rank not in self.ranks:
            raise PlanError(f"Only ranks {self.ranks} hold shards of the tensor. Found rank {rank}. Ask one of those.")
        return self.regions[self.ranks.index(rank)]
