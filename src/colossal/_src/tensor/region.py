"""Rectangular index ranges of tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final


@final
@dataclass(frozen=True, order=True)
class Region:
    """A rectangular index range of a tensor.

    Args:
        start: First index along each dimension.
        shape: Length along each dimension.

    Example:
        >>> from colossal._src.tensor import Region
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
