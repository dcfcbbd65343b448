"""Layouts that follow no rule: a list of boxes for each rank."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

from colossal.errors import PlanError
from colossal.tensor.region import Region


@final
@dataclass(frozen=True)
class RegionLayout:
    """Which rank holds which boxes of a tensor.

    Args:
        shape: The shape of the whole tensor.
        ranks: The global ranks that hold it.
        boxes: For each of them its boxes; several ranks may hold the same box, and otherwise boxes do not overlap.

    Raises:
        PlanError: There are not as many lists of boxes as ranks.

    Example:
        >>> from colossal.tensor import RegionLayout, Region
        >>> upper, lower = Region((0, 0), (1, 4)), Region((1, 0), (2, 4))
        >>> RegionLayout((3, 4), (0, 1), ((upper,), (lower,))).regions_of(1)
        (Region(start=(1, 0), shape=(2, 4)),)
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    boxes: tuple[tuple[Region, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.boxes):
            raise PlanError(
                f"A layout of boxes lists those of each rank. Found {len(self.boxes)} lists for the ranks "
                f"{self.ranks}. Pass one for each."
            )

    @classmethod
    def merged(cls, shape: tuple[int, ...], layouts: Iterable[Mapping[Region, tuple[int, ...]]]) -> Self:
        """Put together what several groups of ranks hold of one tensor.

        Replicas may be cut in other ways than the tensor itself: of two cuts that contradict each other, the first
        counts.

        Args:
            shape: The shape of the whole tensor.
            layouts: The ranks that hold each box, as each group knows it.

        Returns:
            Which rank holds which boxes; ranks whose boxes do not count have none.

        Raises:
            PlanError: The boxes do not make up the tensor.

        Example:
            >>> from colossal.tensor import RegionLayout, Region
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
                f"Boxes make up their whole tensor of the shape {shape}. Found that {missing} elements are in none. "
                "Ask all ranks that hold a part of it."
            )
        ranks = sorted({rank for each in holders.values() for rank in each})
        boxes = tuple(tuple(region for region, held in holders.items() if rank in held) for rank in ranks)
        return cls(shape, tuple(ranks), boxes)

    @cached_property
    def holders(self) -> dict[Region, tuple[int, ...]]:
        """The ranks that hold each box with elements."""
        holders: dict[Region, tuple[int, ...]] = {}
        for rank, boxes in zip(self.ranks, self.boxes, strict=True):
            for box in boxes:
                if box.numel:
                    holders[box] = (*holders.get(box, ()), rank)
        return holders

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Find what a rank holds.

        Args:
            rank: A global rank.

        Returns:
            Its boxes.

        Raises:
            PlanError: The rank holds no part of the tensor.
        """
        if rank not in self.ranks:
            raise PlanError(
                f"Only ranks {self.ranks} hold parts of this tensor. Found rank {rank}. Ask one of them for its boxes."
            )
        return self.boxes[self.ranks.index(rank)]
