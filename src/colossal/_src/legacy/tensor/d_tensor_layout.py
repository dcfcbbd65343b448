"""How a tensor is sharded over the axes of a `DeviceMesh`, and the layout that follows for its shape."""

from collections.abc import Mapping, Sequence
from typing import final

import torch

from colossal._src.legacy.mesh import DeviceMesh
from colossal._src.tensor import Layout, layout_difference
from colossal.errors import PlanError


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


def _axes_of(spec: ShardingSpec) -> list[int]:
    return [axis for axes in spec.dim_partition_dict.values() for axis in axes]


def _layout(spec: ShardingSpec, grid: tuple[int, ...]) -> Layout:
    return Layout((1,) * spec.dims, grid=grid, dims=tuple(tuple(each.shard_list) for each in spec.sharding_sequence))
