"""What a tensor says of its placement, and the only bridge between torch's DTensor and layouts."""

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from colossal._src.comm import all_reduce_over
from colossal._src.tensor.flat_layout import FlatLayout
from colossal._src.tensor.layout import Layout
from colossal._src.tensor.placement import Placement, known_placement, local_operations, plain_values
from colossal._src.tensor.region import Region, RegionLayout
from colossal.errors import UnsupportedError


def placement_of(tensor: torch.Tensor) -> Placement:
    """Return where the elements of a tensor are, which is what every reduction over a full tensor has to know.

    Args:
        tensor: A DTensor, what `set_placement` knows, or any other tensor, which is full. A gradient or an optimizer
            state is placed as its parameter is: ask that.

    Returns:
        The placement.

    Raises:
        UnsupportedError: A DTensor is sharded in another order than that of its mesh (strided), or holds partial
            results.

    Example:
        >>> import torch
        >>> from colossal.tensor import placement_of
        >>> placement_of(torch.ones(3)).shard_groups
        ()
    """
    if (placement := known_placement(tensor)) is not None:
        return placement
    if not is_dtensor(tensor):
        return Placement.full(tensor.shape)
    sharded: Any = tensor
    mesh, axes = sharded.device_mesh, [_sharded_dim(placement) is not None for placement in sharded.placements]
    groups = [mesh.get_group(axis) for axis in range(len(axes))]
    return Placement(
        _layout_of_dtensor(tensor),
        dist.get_rank(),
        shard_groups=tuple(group for group, shards in zip(groups, axes, strict=True) if shards),
        replica_groups=tuple(group for group, shards in zip(groups, axes, strict=True) if not shards),
        device_type=mesh.device_type,
    )


def layout_of(tensor: torch.Tensor, ranks: Sequence[int] = (0,)) -> Layout | FlatLayout | RegionLayout:
    """Return which ranks hold which regions of a tensor.

    Args:
        tensor: A DTensor, what `set_placement` knows, or any other tensor: that is full on each of `ranks`.
        ranks: The global ranks that hold a tensor which is not sharded.

    Returns:
        The layout of the full tensor.

    Raises:
        UnsupportedError: A DTensor is sharded in another order than that of its mesh (strided), or holds partial
            results that are no sums.

    Example:
        >>> import torch
        >>> from colossal.tensor import layout_of
        >>> [region.shape for region in layout_of(torch.zeros(4, 2)).regions_of(0)]
        [(4, 2)]
    """
    placement = known_placement(tensor)
    if placement is not None and placement.is_sharded:
        return placement.holders
    if is_dtensor(tensor):
        return _layout_of_dtensor(tensor)
    return _shared(tuple(tensor.shape), tuple(ranks))


def dtensor_placements(layout: Layout) -> tuple[Any, ...]:
    """Write a layout as torch's DTensor does.

    Args:
        layout: The layout.

    Returns:
        A placement for each axis of its grid: `Shard`, `Replicate` or `Partial`.

    Raises:
        UnsupportedError: Axes shard one dimension in another order than that of the grid, or the dimension is packed:
            DTensor cannot express either.

    Example:
        >>> from colossal.tensor import Layout, dtensor_placements
        >>> dtensor_placements(Layout.parse("RS0P1", (4, 4), grid=(2, 2)))
        (Shard(dim=1), Partial(sum))
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    is_packed = any(axes and len(groups) > 1 for axes, groups in zip(layout.dims, layout.groups, strict=True))
    if is_packed or any(list(axes) != sorted(axes) for axes in layout.dims):
        raise UnsupportedError(
            "DTensor shards a dimension along the axes in the order of its mesh, and as one block. Found "
            f"{layout} with the groups {layout.groups}. Convert the tensor to such a layout first."
        )
    sharded_dims = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    return tuple(
        Shard(sharded_dims[axis]) if axis in sharded_dims else Partial() if axis in layout.partial else Replicate()
        for axis in range(len(layout.grid))
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Take the part that this rank holds.

    Args:
        tensor: A DTensor, or any other tensor.

    Returns:
        The local shard, sharing memory with `tensor`; `tensor` itself if it is not sharded.

    Example:
        >>> import torch
        >>> from colossal.tensor import local_of
        >>> tensor = torch.ones(3)
        >>> local_of(tensor) is tensor
        True
    """
    if not is_dtensor(tensor):
        return plain_values(tensor)
    sharded: Any = tensor
    with torch.no_grad():  # which spares an operation of autograd
        return sharded.to_local()


def local_regions_of(tensor: torch.Tensor, rank: int = 0) -> list[tuple[Region, torch.Tensor]]:
    """Look at what this rank holds of a tensor as regions of the full one."""
    if is_dtensor(tensor):
        (region,) = _layout_of_dtensor(tensor).regions_of(rank)
        return [(region, local_of(tensor))]
    return placement_of(tensor).views(tensor)


def full_tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    """Put a tensor together from the shards of all ranks.

    Args:
        tensor: A DTensor, what `set_placement` knows, or any other tensor.

    Returns:
        The full tensor, without gradient; `tensor` itself if it is full.

    Communication: all_gather, the axes that shard the tensor, its bytes; all_reduce for what `set_placement` knows; all
    of its ranks must call.

    Example:
        >>> import torch
        >>> from colossal.tensor import full_tensor_of
        >>> full_tensor_of(torch.ones(3)).shape
        torch.Size([3])
    """
    if is_dtensor(tensor):
        sharded: Any = tensor.detach()
        full = sharded.to(sharded.device_mesh.device_type).full_tensor()  # FSDP2 may keep shards in host memory
        return full.to(tensor.device)
    placement = placement_of(tensor)
    if not placement.is_sharded:
        return tensor
    # Shards may differ in size, so instead of a gather, each rank adds its elements to zeros.
    full = torch.zeros(placement.shape, dtype=tensor.dtype, device=tensor.device)
    for region, view in placement.views(local_of(tensor).detach()):
        full[region.slices] = view
    return all_reduce_over(full, placement.shard_groups)


_TORCH: Any = torch
_NORMS: frozenset[Any] = frozenset((_TORCH.linalg.vector_norm, _TORCH.norm, _TORCH.Tensor.norm))


@final
class ShardedGradient(torch.Tensor):
    """The local gradient of a shard, whose norm is that of the full gradient.

    Everything else takes it for the local tensor that it is, as optimizers do; so `torch.nn.utils.clip_grad_norm_`
    scales all ranks by the same factor.
    """

    is_local_view = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on local values; norms on full ones.

        Communication: of norms all_reduce, the axes that shard it, the bytes of the full gradient.
        """
        with local_operations():
            if func in _NORMS and args and isinstance(args[0], cls):
                args = (full_tensor_of(args[0]), *args[1:])
            return func(*args, **(kwargs or {}))


def comm_device(tensor: torch.Tensor) -> torch.device:
    """Return the device on which the process groups of a tensor communicate."""
    return placement_of(tensor).comm_device(tensor.device)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor, which takes half as long as torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks see what is saved now for the backward pass, as those of activation checkpoints do."""
    inside: Any = torch
    return inside._C._autograd._top_saved_tensors_default_hooks(False) is not None  # noqa: SLF001 (it has no public name)


def is_placed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a placement other than that of any full tensor, which takes longer to make."""
    return known_placement(tensor) is not None or is_dtensor(tensor)


def _layout_of_dtensor(tensor: Any) -> Layout:
    ranks, grid = _grid_of(tensor.device_mesh)
    sharded_dims = [_sharded_dim(placement) for placement in tensor.placements]
    dims = tuple(tuple(axis for axis, at in enumerate(sharded_dims) if at == dim) for dim in range(tensor.dim()))
    partial = tuple(axis for axis, placement in enumerate(tensor.placements) if _is_sum(placement))
    return _shared(tuple(tensor.shape), ranks, grid, dims, partial)


_GRIDS: WeakKeyDictionary[Any, tuple[tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()


def _grid_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks and the shape of a mesh, which torch computes anew whenever it is asked."""
    if mesh not in _GRIDS:
        _GRIDS[mesh] = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)
    return _GRIDS[mesh]


_shared = lru_cache(4096)(Layout)  # a model has many tensors, and few layouts, each of which computes its regions once


def _sharded_dim(placement: Any) -> int | None:
    if type(placement).__name__ == "Shard":
        return placement.dim
    if type(placement).__name__ == "Replicate" or _is_sum(placement):
        return None
    raise UnsupportedError(
        f"A layout knows dimensions that are sharded, replicas and partial sums. Found the placement {placement}. "
        "Redistribute the DTensor to Shard or Replicate first."
    )


def _is_sum(placement: Any) -> bool:
    return type(placement).__name__ == "Partial" and placement.reduce_op == "sum"
