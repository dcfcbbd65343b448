"""How one tensor is distributed over the ranks that hold it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Self, final

from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import chunk_bounds
from colossal._src.tensor.region import Region
from colossal.errors import MeshError, PlanError

_WORDS = re.compile(r"(?:R|S\d+)")
_TEXT = re.compile(rf"({_WORDS.pattern}*)(?:P(\d+))?")

Extent = tuple[int, int]
"""First index, and length."""


@final
@dataclass(frozen=True)
class Layout:
    """Which rank holds which shard of a tensor.

    The ranks form a grid. Along each axis of the grid the tensor is either sharded along one of its dimensions, as
    `torch.chunk` splits it, or replicated, or each rank holds a partial sum of it. Several axes that shard one
    dimension do so one after the other, in the order in which they are named.

    It is written as a word for each dimension, ``R`` or ``S`` and the axes that shard it, and at the end ``P`` and the
    axes along which there are partial sums: ``S0R``, ``RS01``, ``S1RP0``.

    Args:
        shape: The shape of the full tensor.
        ranks: The global ranks that hold it, in the order in which the grid numbers them; from 0 on by default.
        grid: The size of each axis of the grid; all ranks on one axis by default.
        dims: For each dimension of the tensor the axes that shard it, the outermost first; none by default.
        partial: The axes along which the ranks hold partial sums.
        groups: For each dimension the lengths of the blocks that are packed into it, such as query, key and value:
            each of them is sharded separately. By default a dimension is one block.
        axes: The names of the grid's axes on a `ParallelMesh`, for what has to communicate.

    Raises:
        PlanError: The sizes contradict each other, or an axis is used twice, or does not exist.

    Example:
        >>> from colossal.tensor import Layout
        >>> layout = Layout((5, 3), ranks=(0, 1), dims=((0,), ()))
        >>> layout.region(1)
        Region(start=(3, 0), shape=(2, 3))
        >>> print(layout, Layout.parse("RS01", (4, 8), grid=(2, 2)).local_shape(3))
        S0R (4, 2)
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    dims: tuple[tuple[int, ...], ...] = ()
    partial: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        grid = self.grid or (len(self.ranks) or 1,)
        self._set("grid", grid)
        self._set("ranks", self.ranks or tuple(range(math.prod(grid))))
        self._set("dims", self.dims or ((),) * len(self.shape))
        self._set("partial", tuple(sorted(self.partial)))
        self._set("groups", self.groups or tuple((length,) for length in self.shape))
        self._check()

    @classmethod
    def parse(
        cls,
        text: str,
        shape: Sequence[int],
        grid: Sequence[int] = (),
        *,
        groups: Sequence[Sequence[int]] = (),
        mesh: ParallelMesh | None = None,
        axes: Sequence[Axis] = (),
    ) -> Self:
        """Read a layout as it is written.

        Args:
            text: Such as ``"S0R"``, ``"RS01"`` or ``"RRP0"``.
            shape: The shape of the full tensor.
            grid: The size of each axis; with a mesh, it comes from there.
            groups: See the class.
            mesh: The mesh whose ranks hold the tensor.
            axes: The axes of the mesh that the numbers mean: the first one is 0.

        Returns:
            The layout; with a mesh, that of the ranks which this one meets along the axes.

        Raises:
            PlanError: The text is not such a layout, or does not fit the shape or the grid.
            MeshError: There is no such axis, or there are axes without a mesh.

        Example:
            >>> from colossal.tensor import Layout
            >>> Layout.parse("S0S1", (6, 4), grid=(3, 2)).region(5)
            Region(start=(4, 2), shape=(2, 2))
        """
        match = _TEXT.fullmatch(text)
        if match is None or len(_WORDS.findall(match[1])) != len(shape):
            raise PlanError(
                "A layout is R or S and axes for each dimension, and P and axes at the end if there are partial sums. "
                f"Found {text!r} for the shape {tuple(shape)}. Write it as in S0R, RS01 or RRP0."
            )
        dims = tuple(tuple(map(int, word[1:])) for word in _WORDS.findall(match[1]))
        partial = tuple(map(int, match[2] or ""))
        if bool(axes) != (mesh is not None):
            raise MeshError("Axes are those of a mesh. Found one without the other. Pass mesh= and axes= both.")
        ranks = () if mesh is None else mesh.ranks(*axes)
        sizes = tuple(grid) if mesh is None else tuple(mesh.size(axis) for axis in axes)
        return cls(tuple(shape), ranks, sizes, dims, partial, tuple(map(tuple, groups)), tuple(axes))

    def __str__(self) -> str:
        """As `parse` reads it."""
        words = ["S" + "".join(map(str, axes)) if axes else "R" for axes in self.dims]
        return "".join(words) + ("P" + "".join(map(str, self.partial)) if self.partial else "")

    @cached_property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """The coordinate of each rank on the grid."""
        return dict(zip(self.ranks, product(*map(range, self.grid)), strict=True))

    @cached_property
    def regions(self) -> dict[int, tuple[Region, ...]]:
        """The regions of each rank, one or as many as there are groups in what is sharded."""
        return {rank: self._regions_at(place) for rank, place in self.coordinates.items()}

    @cached_property
    def holders(self) -> dict[Region, tuple[int, ...]]:
        """The ranks that hold each region with elements, several of them where the tensor is replicated."""
        holders: dict[Region, tuple[int, ...]] = {}
        for rank, regions in self.regions.items():
            for region in regions:
                if region.numel:
                    holders[region] = (*holders.get(region, ()), rank)
        return holders

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The largest local shape, to which local shards are padded where all must have the same size."""
        return tuple(padded_length(self, dim, axes) for dim, axes in enumerate(self.dims))

    def region(self, rank: int) -> Region:
        """Find what a rank holds.

        Args:
            rank: A global rank.

        Returns:
            Its region; without elements where there is too little to shard.

        Raises:
            PlanError: The rank holds no shard of the tensor, or several, as its dimension is packed.
        """
        first, *others = self.regions_of(rank)
        if others:
            raise PlanError(
                f"Only a tensor without packed blocks has one region per rank. Found {1 + len(others)} on rank {rank}, "
                f"of the groups {self.groups}. Ask for regions_of(rank)."
            )
        return first

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Find what a rank holds of a tensor whose dimensions may be packed.

        Args:
            rank: A global rank.

        Returns:
            Its regions, in the order in which its local tensor has them.

        Raises:
            PlanError: The rank holds no shard of the tensor.
        """
        self.coordinate_of(rank)
        return self.regions[rank]

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """Find a rank on the grid.

        Args:
            rank: A global rank.

        Returns:
            Its index along each axis.

        Raises:
            PlanError: The rank holds no shard of the tensor.
        """
        if rank not in self.coordinates:
            raise PlanError(
                f"Only ranks {self.ranks} hold shards of the tensor. Found rank {rank}. Ask one of them for its region."
            )
        return self.coordinates[rank]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Find the shape of what a rank holds.

        Args:
            rank: A global rank.

        Returns:
            The shape of its local tensor.

        Raises:
            PlanError: The rank holds no shard of the tensor.
        """
        place = self.coordinate_of(rank)
        return tuple(sum(length for _, length in self.extents(dim, place)) for dim in range(len(self.shape)))

    def extents(self, dim: int, place: Sequence[int]) -> tuple[Extent, ...]:
        """Find what a place of the grid holds of a dimension.

        Args:
            dim: A dimension of the tensor.
            place: An index along each axis of the grid.

        Returns:
            First index and length: one pair, or one for each of the groups of a dimension that is sharded.
        """
        if not self.dims[dim]:
            return ((0, self.shape[dim]),)
        found: list[tuple[int, int]] = []
        at = 0
        for length in self.groups[dim]:
            start, rest = at, length
            for axis in self.dims[dim]:
                offset, rest = chunk_bounds(rest, self.grid[axis], place[axis])
                start += offset
            found.append((start, rest))
            at += length
        return tuple(found)

    def _regions_at(self, place: tuple[int, ...]) -> tuple[Region, ...]:
        sides = product(*(self.extents(dim, place) for dim in range(len(self.shape))))
        return tuple(Region(tuple(at for at, _ in side), tuple(length for _, length in side)) for side in sides)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        used = [*self.partial, *(axis for axes in self.dims for axis in axes)]
        rules = {  # with what to pass instead
            (
                "a rank for each place of its grid",
                f"Pass {math.prod(self.grid)} different ranks, or another grid",
            ): math.prod(self.grid) == len(self.ranks) == len(set(self.ranks)),
            (
                "the axes of its grid, each of them once",
                f"Use each axis from 0 to {len(self.grid) - 1} at most once, in dims or in partial",
            ): len(set(used)) == len(used) and set(used) <= {*range(len(self.grid))},
            (
                "axes for each dimension of the tensor",
                f"Pass {len(self.shape)} tuples as dims, () for a dimension that is not sharded",
            ): len(self.dims) == len(self.shape),
            (
                "groups whose lengths add up to those of the dimensions",
                f"Leave groups out, or pass lengths that add up to {self.shape}",
            ): tuple(map(sum, self.groups)) == self.shape,
            ("a name for each axis, or none", f"Pass {len(self.grid)} names as axes, or leave axes out"): len(self.axes)
            in (0, len(self.grid)),
        }
        for (needed, advice), is_met in rules.items():
            if not is_met:
                raise PlanError(
                    f"A layout needs {needed}. Found {len(self.ranks)} ranks {self.ranks}, grid {self.grid}, dims "
                    f"{self.dims}, partial {self.partial}, groups {self.groups}, axes {self.axes}, shape {self.shape}. "
                    f"{advice}."
                )


def padded_length(layout: Layout, dim: int, axes: Sequence[int]) -> int:
    """Return how long the longest part of a dimension would be, if these axes sharded it."""
    if not axes:
        return layout.shape[dim]
    total = 0
    for length in layout.groups[dim]:
        part = length
        for axis in axes:
            part = -(-part // layout.grid[axis])
        total += part
    return total
