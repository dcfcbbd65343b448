# pyright: reportUnknownMemberType=false
"""Plain tensors that carry a layout on a `DeviceMesh`, and conversions between such layouts."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.legacy.mesh import DeviceMesh
from colossal._src.tensor import Layout, full_tensor_of, layout_difference, placement_of, relayout, set_data, shard
from colossal.errors import PlanError, UnsupportedError

_ATTR = "dist_layout"


@final
class DimSpec:
    """Which axes of a mesh shard one dimension: ``R`` for none, else ``S`` and their numbers.

    Args:
        shard_list: The axes, the outermost first.

    Example:
        >>> from colossal.legacy.d_tensor import DimSpec
        >>> DimSpec([]), DimSpec([0, 1])
        (R, S01)
    """

    def __init__(self, shard_list: Sequence[int]) -> None:
        self.shard_list = list(shard_list)

    def __repr__(self) -> str:
        return "S" + "".join(map(str, self.shard_list)) if self.shard_list else "R"

    def __eq__(self, other: object) -> bool:
        """Whether the same axes shard it."""
        return isinstance(other, DimSpec) and self.shard_list == other.shard_list

    def __hash__(self) -> int:
        return hash(tuple(self.shard_list))

    @property
    def is_replica(self) -> bool:
        """Whether no axis shards it."""
        return not self.shard_list


@final
class ShardingSpec:
    """How the dimensions of a tensor are sharded over the axes of a mesh.

    Superseded by `colossal.tensor.Layout`.

    Args:
        dim_size: The number of dimensions.
        dim_partition_dict: The axes that shard a dimension, by its number; none by default.
        sharding_sequence: The same as a `DimSpec` for each dimension.

    Raises:
        PlanError: Both or a dimension that does not exist are given, or an axis shards twice.

    Attributes:
        dims: The number of dimensions.

    Example:
        >>> from colossal.legacy.d_tensor import ShardingSpec
        >>> ShardingSpec(dim_size=3, dim_partition_dict={0: [0, 1]}).sharding_sequence
        [S01, R, R]
    """

    def __init__(
        self,
        dim_size: int,
        dim_partition_dict: Mapping[int, Sequence[int]] | None = None,
        sharding_sequence: Sequence[DimSpec] | None = None,
    ) -> None:
        if dim_partition_dict is not None and sharding_sequence is not None:
            raise PlanError("A sharding is given in one of two ways. Found both. Leave sharding_sequence out.")
        if sharding_sequence is not None:
            dim_partition_dict = {dim: spec.shard_list for dim, spec in enumerate(sharding_sequence)}
        given = dict(dim_partition_dict or {})
        axes = [axis for each in given.values() for axis in each]
        if any(not 0 <= dim < dim_size for dim in given) or len(set(axes)) < len(axes):
            raise PlanError(
                f"A sharding names dimensions of the tensor, and each axis once. Found {given} for {dim_size} "
                "dimensions. Change the axes."
            )
        self.dims = dim_size
        self.dim_partition_dict = {dim: list(each) for dim, each in sorted(given.items()) if each}
        self.sharding_sequence = [DimSpec(self.dim_partition_dict.get(dim, [])) for dim in range(dim_size)]

    def __repr__(self) -> str:
        return f"ShardingSpec({self.sharding_sequence})"

    def spec_diff(self, other: "ShardingSpec") -> int:
        """Estimate how far it is to another sharding, as `colossal.tensor.layout_difference` does.

        Args:
            other: The other sharding, of as many dimensions.

        Returns:
            The estimate; 0 for the same sharding.
        """
        axes = 1 + max([*_axes_of(self), *_axes_of(other)], default=0)
        return layout_difference(_layout(self, (1,) * axes), _layout(other, (1,) * axes))


@final
class DTensorLayout:
    """The layout of a full tensor on a `DeviceMesh`.

    Superseded by `colossal.tensor.Layout`, which it builds, see `layout`.

    Args:
        device_mesh: The mesh.
        sharding_spec: How the dimensions are sharded.
        global_shape: The shape of the full tensor.

    Attributes:
        layout: The same as a layout of today.

    Raises:
        PlanError: The sharding does not fit the shape or the mesh.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import DTensorLayout, ShardingSpec
        >>> from colossal.legacy.device import DeviceMesh
        >>> mesh = DeviceMesh(torch.arange(4), (2, 2))
        >>> DTensorLayout(mesh, ShardingSpec(2, {0: [0, 1]}), (8, 3)).get_sharded_shape_per_device()
        torch.Size([2, 3])
    """

    def __init__(self, device_mesh: DeviceMesh, sharding_spec: ShardingSpec, global_shape: Sequence[int]) -> None:
        self.device_mesh, self.sharding_spec = device_mesh, sharding_spec
        self.global_shape = torch.Size(global_shape)
        ranks = tuple(device_mesh.logical_mesh_id.flatten().tolist())
        dims = tuple(tuple(spec.shard_list) for spec in sharding_spec.sharding_sequence)
        self.layout = Layout(tuple(global_shape), ranks, device_mesh.shape, dims, axes=device_mesh.grid.names)
        for dim, axes in sharding_spec.dim_partition_dict.items():
            parts = torch.Size([device_mesh.shape[axis] for axis in axes]).numel()
            if self.global_shape[dim] % parts:
                raise PlanError(
                    f"A dimension divides by its number of shards, {parts}. Found dimension {dim} of "
                    f"{tuple(global_shape)}. Use a Layout of colossal.tensor, which shards any length."
                )

    def __repr__(self) -> str:
        return f"Layout({self.sharding_spec.sharding_sequence}, {tuple(self.global_shape)})"

    def get_sharded_shape_per_device(self) -> torch.Size:
        """Return the shape of what each rank holds.

        Returns:
            The shape.
        """
        return torch.Size(self.layout.local_shape(self.layout.ranks[0]))

    def with_dims(self, layout: Layout) -> "DTensorLayout":
        """Return the same with the sharding of a layout of today.

        Args:
            layout: The layout, of the same tensor.

        Returns:
            The new layout.
        """
        spec = ShardingSpec(len(layout.shape), dict(enumerate(layout.dims)))
        return DTensorLayout(self.device_mesh, spec, self.global_shape)


def distribute_tensor(tensor: torch.Tensor, device_mesh: DeviceMesh, sharding_spec: ShardingSpec) -> torch.Tensor:
    """Take this rank's shard of a full tensor.

    Args:
        tensor: The full tensor, the same on all ranks.
        device_mesh: The mesh.
        sharding_spec: How its dimensions are sharded.

    Returns:
        The local tensor, which knows its layout.

    Raises:
        PlanError: The sharding does not fit the tensor or the mesh.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(tensor.shape)
        torch.Size([2, 3])
    """
    layout = DTensorLayout(device_mesh, sharding_spec, tensor.shape)
    return _tag(shard(tensor, layout.layout, dist.get_rank()), layout)


def init_as_dtensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, sharding_spec: ShardingSpec, global_shape: Sequence[int]
) -> torch.Tensor:
    """Let a local tensor know its layout.

    Args:
        tensor: What this rank holds.
        device_mesh: The mesh.
        sharding_spec: How the dimensions are sharded.
        global_shape: The shape of the full tensor.

    Returns:
        The same tensor.

    Raises:
        PlanError: The sharding does not fit the shape or the mesh, or the tensor is not of the local shape.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, get_layout, init_as_dtensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     print(get_layout(init_as_dtensor(torch.ones(2, 3), mesh, ShardingSpec(2, {0: [0]}), (4, 3))))
        Layout([S0, R], (4, 3))
    """
    layout = DTensorLayout(device_mesh, sharding_spec, global_shape)
    if tensor.shape != layout.get_sharded_shape_per_device():
        raise PlanError(
            f"By its layout this rank holds {tuple(layout.get_sharded_shape_per_device())}. Found "
            f"{tuple(tensor.shape)}. Pass the local tensor."
        )
    return _tag(tensor, layout)


def redistribute(dtensor: torch.Tensor, device_mesh: DeviceMesh, sharding_spec: ShardingSpec) -> torch.Tensor:
    """Convert a tensor to another sharding, in place.

    Args:
        dtensor: The local tensor.
        device_mesh: Its mesh.
        sharding_spec: The new sharding.

    Returns:
        The same tensor.

    Raises:
        UnsupportedError: It was computed from others, whose gradients would be lost.
        PlanError: It has no layout, or is on another mesh.

    Communication: that of the cheapest path, see `colossal.tensor.plan_relayout`.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, redistribute
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2))
        ...     print(redistribute(tensor, mesh, ShardingSpec(2, {0: [0]})).shape)
        torch.Size([2, 3])
    """
    if dtensor.grad_fn is not None:
        raise UnsupportedError(
            "A tensor that autograd follows is not converted in place. Found one with a gradient function. Use "
            "LayoutConverter().apply, through which gradients flow."
        )
    source = get_layout(dtensor)
    target = DTensorLayout(device_mesh, sharding_spec, source.global_shape)
    with torch.no_grad():
        set_data(dtensor, convert(dtensor.detach(), source, target))
    return _tag(dtensor, target)


def to_global(dtensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor on all ranks; gradients flow back to the shards, but for those of a sharded layer.

    Args:
        dtensor: The local tensor.

    Returns:
        The full tensor.

    Raises:
        PlanError: It has no layout.

    Communication: all_gather, the axes that shard it, its bytes.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, to_global
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     return to_global(distribute_tensor(torch.arange(4.0), mesh, ShardingSpec(1, {0: [0]}))).tolist()
        >>> run_threads(program, 2)
        [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """
    if not has_layout(dtensor) and _is_shard_of_layer(dtensor):
        return full_tensor_of(dtensor)
    source = get_layout(dtensor)
    target = DTensorLayout(source.device_mesh, ShardingSpec(len(source.global_shape)), source.global_shape)
    return relayout(dtensor, source.layout, target.layout, source.device_mesh.grid.as_mesh()).clone()


def sharded_tensor_to_param(dtensor: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
    """Make a parameter of a local tensor, which knows the same layout.

    Args:
        dtensor: The local tensor.
        requires_grad: Whether the parameter is trained.

    Returns:
        The parameter, which shares the memory.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_layout, sharded_tensor_to_param
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_layout(sharded_tensor_to_param(tensor)))
        Layout([S0, R], (4, 3))
    """
    return _tag(nn.Parameter(dtensor.detach(), requires_grad), get_layout(dtensor))


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor knows a layout, or is a shard of a parameter of a sharded layer.

    Args:
        tensor: Any tensor.

    Returns:
        True if it is either.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, is_distributed_tensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(is_distributed_tensor(tensor), is_distributed_tensor(torch.ones(2)))
        True False
    """
    return has_layout(tensor) or _is_shard_of_layer(tensor)


def has_layout(tensor: torch.Tensor) -> bool:
    """Whether a tensor knows a layout on a `DeviceMesh`."""
    return hasattr(tensor, _ATTR)


def _is_shard_of_layer(tensor: torch.Tensor) -> bool:
    """Whether it is the shard of a parameter that a sharding specification describes: one without packed blocks."""
    layout = placement_of(tensor).layout if placement_of(tensor).is_sharded else None
    return layout is not None and all(len(lengths) == 1 for lengths in layout.groups)


def get_layout(dtensor: torch.Tensor) -> DTensorLayout:
    """Return the layout of a tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The layout.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_layout
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_layout(tensor))
        Layout([S0, R], (4, 3))
    """
    if not has_layout(dtensor):
        raise PlanError(
            f"A distributed tensor knows its layout. Found a plain one of {tuple(dtensor.shape)}. Make it with "
            "distribute_tensor, or call init_as_dtensor."
        )
    return getattr(dtensor, _ATTR)


def get_global_shape(dtensor: torch.Tensor) -> torch.Size:
    """Return the shape of the full tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The shape.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_global_shape
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_global_shape(tensor))
        torch.Size([4, 3])
    """
    if not has_layout(dtensor) and _is_shard_of_layer(dtensor):
        return torch.Size(placement_of(dtensor).shape)
    return get_layout(dtensor).global_shape


def get_device_mesh(dtensor: torch.Tensor) -> DeviceMesh:
    """Return the mesh of a tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The mesh.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_device_mesh
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_device_mesh(tensor) is mesh)
        True
    """
    return get_layout(dtensor).device_mesh


def get_sharding_spec(dtensor: torch.Tensor) -> ShardingSpec:
    """Return how the dimensions of a tensor are sharded.

    Args:
        dtensor: The local tensor.

    Returns:
        The sharding.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_sharding_spec
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_sharding_spec(tensor))
        ShardingSpec([S0, R])
    """
    return get_layout(dtensor).sharding_spec


def compute_global_numel(dtensor: torch.Tensor) -> int:
    """Return the number of elements of the full tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The number.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, compute_global_numel, distribute_tensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(compute_global_numel(tensor))
        12
    """
    return get_global_shape(dtensor).numel()


def convert(tensor: torch.Tensor, source: DTensorLayout, target: DTensorLayout) -> torch.Tensor:
    """Convert a local tensor to another layout, which it knows then."""
    return _tag(relayout(tensor, source.layout, target.layout, source.device_mesh.grid.as_mesh()).clone(), target)


def copy_layout(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Let another local tensor have the layout of one."""
    return _tag(target, get_layout(source))


def _tag(tensor: Any, layout: DTensorLayout) -> Any:
    setattr(tensor, _ATTR, layout)
    return tensor


def _axes_of(spec: ShardingSpec) -> list[int]:
    return [axis for axes in spec.dim_partition_dict.values() for axis in axes]


def _layout(spec: ShardingSpec, grid: tuple[int, ...]) -> Layout:
    return Layout((1,) * spec.dims, grid=grid, dims=tuple(tuple(each.shard_list) for each in spec.sharding_sequence))
