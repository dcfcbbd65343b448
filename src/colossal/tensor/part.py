"""Parts of tensors: what a rank computes with where a layer is divided."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, final

import torch
from torch import distributed as dist

from colossal.errors import PlanError
from colossal.tensor.layout import Extent, Layout
from colossal.tensor.region import Region

_MARK = "_colossal_part"


@final
@dataclass(frozen=True)
class TensorPart:
    """What a tensor is a part of.

    A part is a tensor of its own for everything that computes with it. Checkpoints ask what it is a part of.

    Args:
        layout: How the whole tensor lies; without partial sums.
        rank: The global rank of this process.
        groups: The groups of ranks whose parts make up the whole tensor.

    Example:
        >>> from colossal.tensor import Layout, Region, TensorPart
        >>> part = TensorPart(Layout.parse("RS0", (2, 6), grid=(2,), groups=[(2,), (4, 2)]), rank=1)
        >>> for region, inner in part.outward(Region.whole((2, 3))):  # two columns of one piece, one of the other
        ...     print(region.start, inner.start, inner.shape)
        (0, 2) (0, 0) (2, 2)
        (0, 5) (0, 2) (2, 1)
    """

    layout: Layout
    rank: int
    groups: tuple[dist.ProcessGroup, ...] = ()

    def __deepcopy__(self, _memo: object) -> "TensorPart":
        """The processes are not copied with a tensor that knows them."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Groups of processes do not outlive their program, so a file of a part leaves them out."""
        return TensorPart, (self.layout, self.rank)

    @property
    def extents(self) -> list[tuple[Extent, ...]]:
        """First index and length of each piece that this rank has, for each dimension."""
        place = self.layout.place_of(self.rank)
        return [self.layout.extents(dim, place) for dim in range(len(self.layout.shape))]

    def outward(self, box: Region) -> list[tuple[Region, Region]]:
        """Find where a box of the part lies in the whole tensor.

        Args:
            box: Counted from the start of the part.

        Returns:
            The boxes of the whole tensor that it consists of, and each of them counted from the start of the box.
        """
        sides = zip(self.extents, box.start, box.shape, strict=True)
        pieces = product(*(list(_pieces(extents, start, length)) for extents, start, length in sides))
        found = ([tuple(each) for each in zip(*piece, strict=True)] or [(), (), ()] for piece in pieces)
        return [(Region(there, shape), Region(here, shape)) for there, here, shape in found]

    def views(self, boxes: Iterable[tuple[Region, torch.Tensor]]) -> list[tuple[Region, torch.Tensor]]:
        """Look at boxes of the part as boxes of the whole tensor.

        Args:
            boxes: Each counted from the start of the part, with its elements.

        Returns:
            Each box of the whole tensor with its elements, which share memory with those.
        """
        return [(region, held[inner.slices]) for box, held in boxes for region, inner in self.outward(box)]


def mark_part(tensor: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """Remember what a tensor is a part of, so that checkpoints know.

    Args:
        tensor: What this rank has, or a range of it that `mark_shard` knows.
        part: What it is.

    Returns:
        The same tensor.

    Raises:
        PlanError: It has more elements than the part, or there are partial sums.

    Example:
        >>> import torch
        >>> from colossal.tensor import Layout, TensorPart, layout_of, mark_part
        >>> half = mark_part(torch.zeros(3, 2), TensorPart(Layout.parse("S0R", (6, 2), grid=(2,)), rank=1))
        >>> print(layout_of(half), layout_of(half).shape)
        S0R (6, 2)
    """
    shape = part.layout.local_shape(part.rank)
    if tensor.numel() > Region.whole(shape).numel or part.layout.partial:
        raise PlanError(
            f"A part has the shape {shape} that {part.layout} gives to rank {part.rank}, and no partial sums. Found "
            f"{tuple(tensor.shape)}. Mark what `shard` returned for this layout."
        )
    setattr(tensor, _MARK, part)
    return tensor


def tensor_part_of(tensor: torch.Tensor) -> TensorPart | None:
    """Tell what a tensor is a part of.

    Args:
        tensor: Any tensor.

    Returns:
        What `mark_part` was told; None for any other tensor.

    Example:
        >>> import torch
        >>> from colossal.tensor import tensor_part_of
        >>> tensor_part_of(torch.zeros(2)) is None
        True
    """
    found: Any = getattr(tensor, _MARK, None)
    return found


def _pieces(extents: Iterable[Extent], start: int, length: int) -> Iterable[tuple[int, int, int]]:
    """Cut a stretch of a part's dimension where the part's pieces end: where in the whole, in the stretch, how long."""
    at = 0
    for first, size in extents:
        begin, end = max(start, at), min(start + length, at + size)
        if begin < end:
            yield first + begin - at, begin - start, end - begin
        at += size
