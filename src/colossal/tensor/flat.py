"""Ranges of flattened tensors: how optimizers hold the parameters that ranks share among themselves."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import distributed as dist

from colossal.errors import PlanError
from colossal.tensor.part import mark_part, tensor_part_of
from colossal.tensor.region import Region

_MARK = "_colossal_flat_shard"
_RESTING = "_colossal_resting"


@final
@dataclass(frozen=True)
class FlatLayout:
    """Which rank holds which range of a tensor's elements, counted in the order of a contiguous tensor.

    Unlike a `Layout`, it cuts anywhere, so that ranks get shares of one size from tensors of any shape. What a rank
    holds is a tensor of one dimension.

    Args:
        shape: The shape of the whole tensor.
        ranks: The global ranks that hold it.
        ranges: For each of them its first element and the one behind its last; several ranks may hold the same range.

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
                f"{self.ranks} and the ranges {self.ranges}. Change what does not fit."
            )

    @cached_property
    def regions(self) -> dict[int, tuple[Region, ...]]:
        """The boxes that the range of each rank consists of, in the order of its elements."""
        return {rank: tuple(_boxes(self.shape, *range_)) for rank, range_ in zip(self.ranks, self.ranges, strict=True)}

    @cached_property
    def holders(self) -> dict[Region, tuple[int, ...]]:
        """The ranks that hold each box."""
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
            The boxes that its range consists of, in the order of its elements.

        Raises:
            PlanError: The rank holds no part of the tensor.
        """
        if rank not in self.regions:
            raise PlanError(
                f"Only ranks {self.ranks} hold parts of this tensor. Found rank {rank}. Ask one of them for its region."
            )
        return self.regions[rank]


@final
@dataclass(frozen=True)
class FlatShard:
    """What a tensor is a range of.

    Args:
        layout: Who holds which range.
        rank: The global rank of this process.
        groups: The groups of ranks whose ranges make up the whole tensor.
        device_type: Where those groups communicate; the range itself may be offloaded to the CPU.

    Example:
        >>> from colossal.tensor import FlatLayout, FlatShard
        >>> FlatShard(FlatLayout((4,), (0,), ((0, 4),)), rank=0).groups
        ()
    """

    layout: FlatLayout
    rank: int
    groups: tuple[dist.ProcessGroup, ...] = ()
    device_type: str = "cpu"

    def __deepcopy__(self, _memo: object) -> "FlatShard":
        """The processes are not copied with a tensor that knows them."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Groups of processes do not outlive their program, so a file of a range leaves them out."""
        return FlatShard, (self.layout, self.rank, (), self.device_type)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The boxes of the whole tensor that this rank's range consists of."""
        return self.layout.regions_of(self.rank)


def mark_shard(tensor: torch.Tensor, shard: FlatShard) -> torch.Tensor:
    """Remember what a tensor is a range of, so that norms, checkpoints and optimizers know.

    Args:
        tensor: Of one dimension, with the elements of this rank's range.
        shard: What it is.

    Returns:
        The same tensor.

    Raises:
        PlanError: It has another number of elements.

    Example:
        >>> import torch
        >>> from colossal.tensor import FlatLayout, FlatShard, layout_of, mark_shard
        >>> shard = FlatShard(FlatLayout((2, 3), (0, 1), ((0, 4), (4, 6))), rank=1)
        >>> layout_of(mark_shard(torch.zeros(2), shard)).shape
        (2, 3)
    """
    numel = sum(region.numel for region in shard.regions)
    if tensor.shape != (numel,):
        raise PlanError(
            f"A range is a tensor of one dimension with its {numel} elements. Found the shape {tuple(tensor.shape)}. "
            "Flatten it, or pass the layout of this one."
        )
    setattr(tensor, _MARK, shard)
    return tensor


def mark_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Remember that a tensor is the same range or part as another one, such as a gradient or a state as its parameter.

    Args:
        tensor: Any tensor.
        other: Any tensor.

    Returns:
        `tensor` itself, marked if `other` is and has its shape.

    Example:
        >>> import torch
        >>> from colossal.tensor import flat_shard_of, mark_like
        >>> flat_shard_of(mark_like(torch.zeros(2), torch.ones(2))) is None
        True
    """
    shard, part = flat_shard_of(other), tensor_part_of(other)
    if tensor.shape == other.shape and part is not None:
        mark_part(tensor, part)
    return tensor if shard is None or tensor.shape != other.shape else mark_shard(tensor, shard)


def flat_shard_of(tensor: torch.Tensor) -> FlatShard | None:
    """Tell what a tensor is a range of.

    Args:
        tensor: Any tensor.

    Returns:
        What `mark_shard` was told; None for any other tensor.

    Example:
        >>> import torch
        >>> from colossal.tensor import flat_shard_of
        >>> flat_shard_of(torch.zeros(2)) is None
        True
    """
    found: Any = getattr(tensor, _MARK, None)
    return found


def mark_resting(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Remember where the values of a parameter are while it has none of its own.

    Args:
        parameter: Of a model.
        part: What this rank keeps of it: a range that `mark_shard` knows.

    Example:
        >>> import torch
        >>> from colossal.tensor import mark_resting, resting_part
        >>> parameter, part = torch.nn.Parameter(torch.zeros(4)), torch.ones(2)
        >>> mark_resting(parameter, part)
        >>> resting_part(parameter)
        tensor([1., 1.])
    """
    setattr(parameter, _RESTING, part)


def resting_part(value: Any) -> Any:
    """Look where the values of a parameter are.

    Args:
        value: A parameter, or anything else.

    Returns:
        What `mark_resting` was told; `value` itself if it has its own values.

    Example:
        >>> import torch
        >>> from colossal.tensor import resting_part
        >>> resting_part(torch.zeros(1))
        tensor([0.])
    """
    return getattr(value, _RESTING, value)


def boxes_of(tensor: torch.Tensor, like: torch.Tensor | None = None) -> list[tuple[Region, torch.Tensor]]:
    """Look at what is here of a tensor as boxes of the whole one.

    An algorithm that treats rows and columns works on each box, and adds up over `shard_groups`.

    Args:
        tensor: A contiguous tensor: whole, or a range that `mark_shard` knows.
        like: The tensor that says what `tensor` is a range of, such as the parameter of a gradient; `tensor` itself by
            default.

    Returns:
        Each box with its elements, which share memory with `tensor`, in the shape of the box.

    Example:
        >>> import torch
        >>> from colossal.tensor import FlatLayout, FlatShard, boxes_of, mark_shard
        >>> shard = FlatShard(FlatLayout((2, 3), (0, 1), ((0, 4), (4, 6))), rank=0)
        >>> for region, box in boxes_of(mark_shard(torch.arange(4), shard)):
        ...     print(region.start, box.tolist())
        (0, 0) [[0, 1, 2]]
        (1, 0) [[3]]
    """
    shard = flat_shard_of(tensor if like is None else like)
    return [(Region.whole(tensor.shape), tensor)] if shard is None else views_of(tensor, shard.regions)


def views_of(tensor: torch.Tensor, regions: Iterable[Region]) -> list[tuple[Region, torch.Tensor]]:
    """Look at a tensor as boxes that lie in it one behind the other.

    Args:
        tensor: Contiguous, with the elements of the boxes.
        regions: The boxes.

    Returns:
        Each box with its elements, which share memory with `tensor`, in the shape of the box.

    Example:
        >>> import torch
        >>> from colossal.tensor import Region, views_of
        >>> [box.tolist() for _, box in views_of(torch.arange(3), [Region((0, 1), (1, 2)), Region((1, 0), (1, 1))])]
        [[[0, 1]], [[2]]]
    """
    flat, at = tensor.view(-1), 0
    found: list[tuple[Region, torch.Tensor]] = []
    for region in regions:
        found.append((region, flat[at : at + region.numel].view(region.shape)))
        at += region.numel
    return found


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """Tell the shape of the tensor that this is a part of.

    Args:
        tensor: A DTensor, what `mark_shard` or `mark_part` knows, or any other tensor.

    Returns:
        The shape of the whole tensor.

    Example:
        >>> import torch
        >>> from colossal.tensor import whole_shape
        >>> whole_shape(torch.zeros(2, 3))
        torch.Size([2, 3])
    """
    known = tensor_part_of(tensor) or flat_shard_of(tensor)
    return tensor.shape if known is None else torch.Size(known.layout.shape)


def _boxes(shape: Sequence[int], begin: int, end: int) -> list[Region]:
    """Cut a range of elements into boxes: the rest of a row, whole rows, and the beginning of one."""
    if begin >= end:
        return []
    if not shape:
        return [Region((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # within one row
        return _in_row(shape, last, begin - last * inner, end - last * inner)
    boxes = _in_row(shape, first - 1, begin - (first - 1) * inner, inner) if begin < first * inner else []
    if first < last:
        boxes.append(Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + (_in_row(shape, last, 0, end - last * inner) if last * inner < end else [])


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[Region]:
    return [Region((row, *box.start), (1, *box.shape)) for box in _boxes(shape[1:], begin, end)]
