"""How one tensor lies on the ranks that hold it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

from colossal.errors import PlanError


@final
@dataclass(frozen=True, order=True)
class Region:
    """A box inside of a tensor.

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
    def whole(cls, shape: Sequence[int]) -> Self:
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
        """What selects the region from the whole tensor."""
        return tuple(slice(at, at + length) for at, length in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Region") -> "Region":
        """Find what two regions of one tensor share.

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
class Layout:
    """Which rank holds which region of a tensor.

    The ranks form a grid. Along each axis of the grid the tensor is either cut along one of its dimensions, as
    `torch.chunk` cuts, or held whole by all. Two axes that cut one dimension cut it one after the other.

    Args:
        shape: The shape of the whole tensor.
        ranks: The global ranks that hold it, in the order in which the grid numbers them.
        grid: The size of each axis of the grid; all ranks on one axis by default.
        cuts: For each axis of the grid the dimension that it cuts, or None; nothing is cut by default.

    Raises:
        PlanError: The sizes contradict each other, or there is no such dimension.

    Example:
        >>> from colossal.tensor import Layout
        >>> layout = Layout((5, 3), ranks=(0, 1), cuts=(0,))
        >>> layout.region(1)
        Region(start=(3, 0), shape=(2, 3))
        >>> str(Layout((4, 4), ranks=(0, 1, 2, 3), grid=(2, 2), cuts=(None, 1)))
        'RS1'
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    grid: tuple[int, ...] = ()
    cuts: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", self.grid or (len(self.ranks),))
        object.__setattr__(self, "cuts", self.cuts or (None,) * len(self.grid))
        fits = math.prod(self.grid) == len(self.ranks) and len(self.cuts) == len(self.grid)
        if not fits or any(cut is not None and not 0 <= cut < len(self.shape) for cut in self.cuts):
            raise PlanError(
                "A layout needs a rank for each place of its grid, and for each axis of it None or a dimension of the "
                f"tensor. Found {len(self.ranks)} ranks, grid {self.grid}, cuts {self.cuts}, shape {self.shape}. "
                "Make the product of the grid equal to the number of ranks, and the cuts as many as its axes."
            )

    def __str__(self) -> str:
        """For each dimension S and the axes that cut it, or R: as the tutorials write it."""
        axes = [[axis for axis, cut in enumerate(self.cuts) if cut == dim] for dim in range(len(self.shape))]
        return "".join("S" + "".join(map(str, each)) if each else "R" for each in axes)

    @cached_property
    def regions(self) -> dict[int, Region]:
        """The region of each rank."""
        return {rank: self._cut(place) for place, rank in enumerate(self.ranks)}

    @cached_property
    def holders(self) -> dict[Region, tuple[int, ...]]:
        """The ranks that hold each region with elements, several of them where the tensor is replicated."""
        holders: dict[Region, tuple[int, ...]] = {}
        for rank, region in self.regions.items():
            if region.numel:
                holders[region] = (*holders.get(region, ()), rank)
        return holders

    def region(self, rank: int) -> Region:
        """Find what a rank holds.

        Args:
            rank: A global rank.

        Returns:
            Its region; without elements where there is too little to cut.

        Raises:
            PlanError: The rank holds no part of the tensor.
        """
        if rank not in self.regions:
            raise PlanError(
                f"Only ranks {self.ranks} hold parts of this tensor. Found rank {rank}. Ask one of them for its region."
            )
        return self.regions[rank]

    def _cut(self, place: int) -> Region:
        start, shape = [0] * len(self.shape), list(self.shape)
        stride = len(self.ranks)
        for size, dim in zip(self.grid, self.cuts, strict=True):
            stride //= size
            index = place // stride % size
            if dim is not None:
                chunk = -(-shape[dim] // size)
                begin = min(index * chunk, shape[dim])
                start[dim] += begin
                shape[dim] = min(chunk, shape[dim] - begin)
        return Region(tuple(start), tuple(shape))
