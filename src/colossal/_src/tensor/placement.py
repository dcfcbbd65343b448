"""Where the elements of a full tensor are: which of them this rank holds, and over which groups the others are."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Self, final

import torch
from torch import distributed as dist

from colossal._src.tensor.flat_layout import FlatLayout
from colossal._src.tensor.layout import Extent, Layout
from colossal._src.tensor.region import Region, RegionLayout
from colossal.errors import PlanError

PLACEMENT_ATTRIBUTE = "_colossal_placement"
_RESTING = "_colossal_resting"
IS_LOCAL = "is_local_view"
"""What a class of tensors says of itself whose objects are local tensors, on which its operations go further."""

Groups = tuple[dist.ProcessGroup, ...]


@final
@dataclass(frozen=True)
class Placement:
    """What one rank holds of a full tensor, and what it takes to reduce over all of it.

    Everything that needs the full tensor asks its placement: norms, clipping and overflow, optimizers that take sums
    over full parameters, checkpoints. A sum over the full tensor is the sum over the local elements, all-reduced over
    each of `shard_groups`.

    A tensor may be sharded twice: `layout` says which rank computes with which regions (tensor parallelism, or a
    DTensor), and `flat` which elements of that local shard an optimizer keeps (ZeRO).

    Args:
        layout: How the full tensor is sharded over the ranks that compute with it; without partial sums.
        rank: The global rank of this process.
        shard_groups: The process groups whose ranks hold different elements.
        replica_groups: The process groups whose ranks hold the same elements.
        flat: Which range of the elements of the local shard each rank keeps; None if all of them.
        is_counted: Whether this rank's elements count in a sum over all parameters; not, where a pipeline stage holds a
            copy of a parameter that another stage counts.
        device_type: Where the groups communicate; None if that is the device of the tensor.

    Raises:
        PlanError: There are partial sums.

    Example:
        >>> import torch
        >>> from colossal.tensor import Layout, Placement
        >>> placement = Placement(Layout.parse("RS0", (2, 6), grid=(2,), groups=[(2,), (4, 2)]), rank=1)
        >>> for region, _ in placement.views(torch.zeros(2, 3)):  # two columns of one piece, one of the other
        ...     print(region.start, region.shape)
        (0, 2) (2, 2)
        (0, 5) (2, 1)
    """

    layout: Layout
    rank: int = 0
    shard_groups: Groups = ()
    replica_groups: Groups = ()
    flat: FlatLayout | None = None
    is_counted: bool = True
    device_type: str | None = None

    def __post_init__(self) -> None:
        if self.layout.partial:
            raise PlanError(
                f"What a rank holds at rest has no partial sums. Found the layout {self.layout}. Convert the tensor to "
                "a layout without P first."
            )

    def __deepcopy__(self, _memo: object) -> Self:
        """The processes are not copied with a tensor that knows them."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Process groups do not outlive their program, so a file of a shard leaves them out."""
        return Placement, (self.layout, self.rank, (), (), self.flat, self.is_counted, self.device_type)

    @classmethod
    def full(cls, shape: Iterable[int]) -> Self:
        """Make the placement of a tensor that this rank holds in full, and of which it knows no replicas.

        Args:
            shape: Its shape.

        Returns:
            The placement.
        """
        return _full(tuple(shape))  # type: ignore[return-value]

    def flattened(self, flat: FlatLayout, group: dist.ProcessGroup, device_type: str | None = None) -> Self:
        """Make the placement of a range of the elements of this local shard, as ZeRO partitions them.

        Args:
            flat: Which range each rank of the group keeps, of a tensor of this local shape.
            group: The ranks that have equal local shards, and keep different ranges of them.
            device_type: Where the group communicates; None if that is the device of the range.

        Returns:
            The placement of this rank's range, a tensor of one dimension.

        Raises:
            PlanError: It is a range already, or `flat` is for a tensor of another shape.
        """
        if self.flat is not None or flat.shape != self.local_shape:
            raise PlanError(
                f"A range is one of the elements of a local shard of the shape {self.local_shape}. Found ranges of "
                f"{flat.shape}{'' if self.flat is None else ' of what is a range already'}. Pass a FlatLayout of the "
                "local shape."
            )
        groups = (group, *self.shard_groups)
        rank = dist.get_rank()  # a full tensor does not know its rank: it is the same on all
        return replace(self, rank=rank, flat=flat, shard_groups=groups, device_type=device_type or self.device_type)

    def comm_device(self, device: torch.device) -> torch.device:
        """Return the device on which the process groups communicate.

        Args:
            device: Where the local elements are.

        Returns:
            `device`; that of the groups if the elements are offloaded from it.
        """
        return device if self.device_type in (None, device.type) else torch.device(self.device_type)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.layout.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this rank holds; one dimension for a range."""
        if self.flat is not None:
            return (sum(region.numel for region in self.flat.regions_of(self.rank)),)
        return self.layout.local_shape(self.rank)

    @property
    def is_compute_sharded(self) -> bool:
        """Whether ranks compute with different shards of the tensor, as they do under tensor parallelism."""
        return any(self.layout.dims)

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds less than the full tensor."""
        return self.flat is not None or self.is_compute_sharded

    @property
    def groups(self) -> Groups:
        """The groups of its shards and of its replicas, whose ranks agree on what concerns the tensor."""
        return (*self.shard_groups, *self.replica_groups)

    @cached_property
    def holders(self) -> Layout | FlatLayout | RegionLayout:
        """Which rank holds which regions of the full tensor, as far as this rank's groups of shards know."""
        if self.flat is None:
            return self.layout
        if not self.is_compute_sharded:
            return self.flat
        local_regions = (
            tuple(region for local in self.flat.regions_of(rank) for region, _ in self._to_full_regions(local))
            for rank in self.flat.ranks
        )
        return RegionLayout(self.shape, self.flat.ranks, tuple(local_regions))

    def views(self, local: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
        """Look at local elements as regions of the full tensor.

        An algorithm that treats rows and columns works on each region, and adds up over `shard_groups`.

        Args:
            local: What this rank holds, or a tensor like it, such as its gradient.

        Returns:
            Each region with its elements, which share memory with `local`, in the shape of the region.
        """
        local_regions = self.local_views(local)
        if not self.is_compute_sharded:
            return local_regions
        return [
            (region, elements[inner.slices])
            for local_region, elements in local_regions
            for region, inner in self._to_full_regions(local_region)
        ]

    def local_views(self, local: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
        """Look at the elements of a range as regions of the local shard, which is what this rank computes with.

        Args:
            local: What this rank holds, or a tensor like it.

        Returns:
            Each region with its elements, as of `views`; the full local shard for what is no range.
        """
        local = plain_values(local)
        return [(self._full_region, local)] if self.flat is None else views_of(local, self.flat.regions_of(self.rank))

    @cached_property
    def _full_region(self) -> Region:
        """The region of all local elements of a tensor that is no range."""
        return Region.full(self.layout.local_shape(self.rank))

    @cached_property
    def _extents(self) -> list[tuple[Extent, ...]]:
        """First index and length of each block that this rank has, for each dimension."""
        place = self.layout.coordinate_of(self.rank)
        return [self.layout.extents(dim, place) for dim in range(len(self.layout.shape))]

    def _to_full_regions(self, local_region: Region) -> list[tuple[Region, Region]]:
        """Find the regions of the full tensor that a region of the local shard consists of, and their local regions."""
        sides = zip(self._extents, local_region.start, local_region.shape, strict=True)
        blocks = product(*(list(_split_at_blocks(extents, start, length)) for extents, start, length in sides))
        found = ([tuple(values) for values in zip(*block, strict=True)] or [(), (), ()] for block in blocks)
        return [(Region(there, shape), Region(here, shape)) for there, here, shape in found]


@lru_cache(4096)
def _full(shape: tuple[int, ...]) -> Placement:
    return Placement(Layout(shape))


def local_operations() -> Any:
    """Open a context in which operations take tensors of any class for what these store, in this thread."""
    inside: Any = torch
    return inside._C.DisableTorchFunctionSubclass()  # noqa: SLF001 (public only as a mode of all threads)


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """Look at the local values of a tensor whose class runs operations on full tensors as a plain tensor."""
    if not getattr(type(tensor), IS_LOCAL, False):
        return tensor
    with local_operations():
        return tensor.detach().as_subclass(torch.Tensor)


def set_placement(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Remember where the elements of a tensor are, so that norms, checkpoints and optimizers know."""
    if tuple(tensor.shape) != placement.local_shape:
        raise PlanError(
            f"By its placement, this rank holds a tensor of the shape {placement.local_shape}. Found "
            f"{tuple(tensor.shape)}. Pass the local shard: what `shard` returns for the layout, or a range of it."
        )
    setattr(tensor, PLACEMENT_ATTRIBUTE, placement)
    return tensor


def copy_placement(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Remember that a tensor is placed as another one, such as a gradient or an optimizer state as its parameter."""
    placement = known_placement(other)
    # Of another shape are states such as step counts.
    if placement is not None and tensor.shape == other.shape:
        setattr(tensor, PLACEMENT_ATTRIBUTE, placement)
    return tensor


def known_placement(tensor: torch.Tensor) -> Placement | None:
    """Look up the placement that `set_placement` set; None for any other tensor, also for a DTensor."""
    found: Any = getattr(tensor, PLACEMENT_ATTRIBUTE, None)
    return found


def set_backing_shard(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Remember where the values of a parameter are while it has none of its own."""
    setattr(parameter, _RESTING, part)


def backing_shard(value: Any) -> Any:
    """Look where the values of a parameter are."""
    return getattr(value, _RESTING, value)


def views_of(tensor: torch.Tensor, regions: Iterable[Region]) -> list[tuple[Region, torch.Tensor]]:
    """Look at a tensor as regions that are stored in it one after the other."""
    flat, at = tensor.view(-1), 0
    found: list[tuple[Region, torch.Tensor]] = []
    for region in regions:
        found.append((region, flat[at : at + region.numel].view(region.shape)))
        at += region.numel
    return found


def _split_at_blocks(extents: Iterable[Extent], start: int, length: int) -> Iterable[tuple[int, int, int]]:
    """Split a local range at the ends of packed blocks: full start, start in the range, and length of each part."""
    at = 0
    for first, size in extents:
        begin, end = max(start, at), min(start + length, at + size)
        if begin < end:
            yield first + begin - at, begin - start, end - begin
        at += size
