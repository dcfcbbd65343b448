"""How a tensor of known shape is sharded over a `DeviceMesh`, and one collective that changes it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.comm import replicate
from colossal._src.legacy.mesh import DeviceMesh, RankGrid
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.tensor.d_tensor_layout import DimSpec, DTensorLayout, ShardingSpec
from colossal._src.tensor import Layout, layout_difference, relayout
from colossal.errors import PlanError

_FLOAT32 = 4  # bytes


@final
class MeshShardingSpec:
    """How a tensor of known shape is sharded over the axes of a mesh.

    Superseded by `colossal.tensor.Layout`, which it builds, see `layout`.

    Args:
        device_mesh: The mesh.
        entire_shape: The shape of the full tensor.
        dim_partition_dict: The axes that shard a dimension, by its number.
        sharding_sequence: The same as a `DimSpec` for each dimension.

    Attributes:
        layout: The same as a layout of today.

    Raises:
        PlanError: The sharding does not fit the shape or the mesh, or is given twice.

    Example:
        >>> import torch
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.legacy.shape_consistency import MeshShardingSpec
        >>> spec = MeshShardingSpec(DeviceMesh(torch.arange(4), (2, 2)), (8, 6), {0: [0, 1]})
        >>> spec.sharding_sequence, spec.get_sharded_shape_per_device()
        ([S01, R], torch.Size([2, 6]))
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        entire_shape: Sequence[int],
        dim_partition_dict: Mapping[int, Sequence[int]] | None = None,
        sharding_sequence: Sequence[DimSpec] | None = None,
    ) -> None:
        superseded("colossal.tensor.sharding_spec.ShardingSpec", "Layout.parse('S0R', shape, grid=(2, 2))")
        spec = ShardingSpec(len(entire_shape), dim_partition_dict, sharding_sequence)
        found = DTensorLayout(device_mesh, spec, entire_shape)
        self.device_mesh, self.entire_shape, self.layout = device_mesh, found.global_shape, found.layout
        self.dim_partition_dict, self.sharding_sequence = spec.dim_partition_dict, spec.sharding_sequence

    def __repr__(self) -> str:
        sequence = ",".join(map(str, self.sharding_sequence))
        return f"DistSpec(shard_sequence: {sequence}, device_mesh_shape: {self.device_mesh.shape})"

    def get_sharded_shape_per_device(self) -> torch.Size:
        """Return the shape of what each rank holds.

        Returns:
            The shape.
        """
        return torch.Size(self.layout.local_shape(self.layout.ranks[0]))

    def sharding_sequence_difference(self, other: "MeshShardingSpec") -> int:
        """Estimate how far it is to another sharding, as `colossal.tensor.layout_difference` does.

        Args:
            other: The other sharding, of the same tensor.

        Returns:
            The estimate; 0 for the same sharding.
        """
        return layout_difference(self.layout, other.layout)

    def with_dims(self, layout: Layout) -> "MeshShardingSpec":
        """Return the sharding of the same tensor by a layout of today.

        Args:
            layout: The layout.

        Returns:
            The sharding.

        Raises:
            PlanError: A dimension does not divide by its number of shards.
        """
        return MeshShardingSpec(self.device_mesh, self.entire_shape, dict(enumerate(layout.dims)))


@final
class CollectiveCommPattern(Enum):
    """What a collective does forward and backward.

    Attributes:
        GATHER_FWD_SPLIT_BWD: Gathers shards; backward, each rank keeps its shard.
        ALL2ALL_FWD_ALL2ALL_BWD: Shards another dimension; backward, the first again.
        SPLIT_FWD_GATHER_BWD: Each rank keeps its shard; backward, gathers.
        ALLREDUCE_FWD_IDENTITY_BWD: Adds summands up; backward, each gets the gradient of the sum.
        IDENTITY_FWD_ALLREDUCE_BWD: Uses one tensor on all ranks; backward, adds their gradients up.
        MIXGATHER_FWD_SPLIT_BWD: Gathers over several axes.

    Example:
        >>> from colossal.legacy.shape_consistency import CollectiveCommPattern
        >>> CollectiveCommPattern("gather_fwd_split_bwd").name
        'GATHER_FWD_SPLIT_BWD'
    """

    GATHER_FWD_SPLIT_BWD = "gather_fwd_split_bwd"
    ALL2ALL_FWD_ALL2ALL_BWD = "all2all_fwd_all2all_bwd"
    SPLIT_FWD_GATHER_BWD = "split_fwd_gather_bwd"
    ALLREDUCE_FWD_IDENTITY_BWD = "all_reduce_fwd_identity_bwd"
    IDENTITY_FWD_ALLREDUCE_BWD = "identity_fwd_all_reduce_bwd"
    MIXGATHER_FWD_SPLIT_BWD = "mixgather_fwd_split_bwd"


_P = CollectiveCommPattern
_DIMS = {
    _P.GATHER_FWD_SPLIT_BWD: (True, False),
    _P.ALL2ALL_FWD_ALL2ALL_BWD: (True, True),
    _P.SPLIT_FWD_GATHER_BWD: (False, True),
    _P.MIXGATHER_FWD_SPLIT_BWD: (True, False),
}
"""Whether a pattern takes a dimension to gather, and one to shard."""


@final
class CommSpec:
    """One collective along an axis of a mesh, with gradients.

    Superseded by `colossal.tensor.RelayoutStep`, and by `colossal.tensor.relayout`, which runs them.

    Args:
        comm_pattern: What it does.
        sharding_spec: How the tensor is sharded before it; or the process groups by axis.
        gather_dim: The dimension to gather; of a mixed gather several.
        shard_dim: The dimension to shard.
        logical_process_axis: The axis of the mesh; of a mixed gather one for each dimension.
        forward_only: Whether there is no backward pass to pay for.
        mix_gather: Accepted for programs that pass it: the pattern says so.

    Raises:
        PlanError: A dimension or the axis is missing.

    Example:
        >>> import torch
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.legacy.shape_consistency import CollectiveCommPattern, CommSpec, MeshShardingSpec
        >>> from colossal.testing import run_threads
        >>> pattern = CollectiveCommPattern.GATHER_FWD_SPLIT_BWD
        >>> def program():
        ...     spec = MeshShardingSpec(DeviceMesh(torch.arange(2)), (4,), {0: [0]})
        ...     gather = CommSpec(pattern, spec, gather_dim=0, logical_process_axis=0)
        ...     return gather.covert_spec_to_action(torch.full((2,), float(torch.distributed.get_rank()))).tolist()
        >>> run_threads(program, 2)
        [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        comm_pattern: CollectiveCommPattern,
        sharding_spec: MeshShardingSpec | Mapping[int, dist.ProcessGroup],
        gather_dim: int | Sequence[int] | None = None,
        shard_dim: int | None = None,
        logical_process_axis: int | Sequence[int] | None = None,
        forward_only: bool = False,
        mix_gather: bool = False,  # noqa: ARG002 (the documented argument)
    ) -> None:
        gathers, shards = _DIMS.get(comm_pattern, (False, False))
        if logical_process_axis is None or gathers != (gather_dim is not None) or shards != (shard_dim is not None):
            raise PlanError(
                f"{comm_pattern.name} takes an axis{', gather_dim' * gathers}{', shard_dim' * shards}. Found "
                f"logical_process_axis={logical_process_axis}, {gather_dim=}, {shard_dim=}. Pass these."
            )
        self.comm_pattern, self.sharding_spec, self.forward_only = comm_pattern, sharding_spec, forward_only
        self.gather_dim, self.shard_dim, self.logical_process_axis = gather_dim, shard_dim, logical_process_axis
        self._grids: dict[int, RankGrid] = {}

    def __repr__(self) -> str:
        dims = [
            f"{name}:{getattr(self, name)}" for name in ("gather_dim", "shard_dim") if getattr(self, name) is not None
        ]
        parts = [f"comm_pattern:{self.comm_pattern.name}", *dims, f"logical_process_axis:{self.logical_process_axis}"]
        return f"CommSpec:({', '.join(parts)})"

    def covert_spec_to_action(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run it on what this rank holds; gradients flow back.

        Args:
            tensor: The local tensor.

        Returns:
            The local tensor afterwards.

        Communication: the collective, the axis, the bytes of the tensor.
        """
        axes, dims = _listed(self.logical_process_axis), _listed(self.gather_dim)
        if self.comm_pattern in (_P.IDENTITY_FWD_ALLREDUCE_BWD, _P.ALLREDUCE_FWD_IDENTITY_BWD):
            for axis in axes:  # a sum over several axes is one over each after the other
                if self.comm_pattern is _P.IDENTITY_FWD_ALLREDUCE_BWD:
                    tensor = replicate(tensor, "tp", self._grid(axis).as_mesh())
                else:
                    tensor = self._convert(tensor, axis, None, None)
            return tensor
        if self.comm_pattern is not _P.MIXGATHER_FWD_SPLIT_BWD:
            return self._convert(tensor, axes[0], dims[0] if dims else None, self.shard_dim)
        # The innermost axis of a dimension first.
        for axis, dim in reversed(list(zip(axes, dims * len(axes) if len(dims) == 1 else dims, strict=True))):
            tensor = self._convert(tensor, axis, dim, None)
        return tensor

    def get_comm_cost(self) -> dict[str, float]:
        """Predict what it costs by the costs of the mesh, for elements of 4 bytes.

        Returns:
            The seconds ``forward``, ``backward`` and in ``total``.

        Raises:
            PlanError: It was made with process groups, whose costs are not known.
        """
        spec = self.sharding_spec
        if not isinstance(spec, MeshShardingSpec):
            raise PlanError("Costs are those of a mesh. Found process groups. Pass a sharding_spec on a DeviceMesh.")
        axes = _listed(self.logical_process_axis)
        num_bytes = _FLOAT32 * spec.get_sharded_shape_per_device().numel()
        mesh, axis, size = spec.device_mesh, axes[0], spec.device_mesh.shape[axes[0]]
        forward = backward = 0.0
        if self.comm_pattern is _P.GATHER_FWD_SPLIT_BWD:
            forward = mesh.all_gather_cost(size * num_bytes, axis)
        elif self.comm_pattern is _P.MIXGATHER_FWD_SPLIT_BWD:
            for each in reversed(axes):
                num_bytes *= mesh.shape[each]
                forward += mesh.all_gather_cost(num_bytes, each)
        elif self.comm_pattern is _P.SPLIT_FWD_GATHER_BWD:
            backward = mesh.all_gather_cost(num_bytes, axis)
        elif self.comm_pattern is _P.ALL2ALL_FWD_ALL2ALL_BWD:
            forward = backward = mesh.all_to_all_cost(size * num_bytes, axis)
        elif self.comm_pattern is _P.ALLREDUCE_FWD_IDENTITY_BWD:
            forward = mesh.all_reduce_cost(num_bytes, axis)
        else:
            backward = mesh.all_reduce_cost(num_bytes, axis)
        backward = 0.0 if self.forward_only else backward
        return {"forward": forward, "backward": backward, "total": forward + backward}

    def _grid(self, axis: int) -> RankGrid:
        """Return the ranks along an axis as a grid of their own."""
        if axis not in self._grids:
            spec = self.sharding_spec
            if isinstance(spec, MeshShardingSpec):
                group = spec.device_mesh.get_process_group(axis)
                ranks = spec.device_mesh.get_ranks_in_process_group(axis)
            else:
                group = spec[axis]
                ranks = dist.get_process_group_ranks(group)
            self._grids[axis] = RankGrid(torch.tensor(ranks, device="cpu"))
            self._grids[axis].set_group("tp", group)
        return self._grids[axis]

    def _convert(self, tensor: torch.Tensor, axis: int, gathered: int | None, sharded: int | None) -> torch.Tensor:
        grid = self._grid(axis)
        shape = list(tensor.shape)
        if gathered is not None:
            shape[gathered] *= grid.world_size
        ranks = tuple(int(each) for each in grid.array.tolist())
        replicated = Layout(tuple(shape), ranks, grid.shape, ((),) * len(shape), axes=grid.names)
        source = (
            replace(replicated, partial=(0,)) if gathered is None and sharded is None else _along(replicated, gathered)
        )
        return relayout(tensor, source, _along(replicated, sharded), grid.as_mesh())


def bytes_around(action: CommSpec) -> tuple[int, int]:
    """The bytes of the local tensor before and after a collective, of elements of 4 bytes."""
    spec = action.sharding_spec
    if not isinstance(spec, MeshShardingSpec):
        raise PlanError("Bytes are those of a shape. Found process groups. Pass a sharding_spec on a DeviceMesh.")
    before = _FLOAT32 * spec.get_sharded_shape_per_device().numel()
    factor = math.prod(spec.device_mesh.shape[axis] for axis in _listed(action.logical_process_axis))
    gathers, shards = _DIMS.get(action.comm_pattern, (False, False))
    return before, before * (factor if gathers else 1) // (factor if shards else 1)


def _along(layout: Layout, dim: int | None) -> Layout:
    """Shard one dimension of a replicated layout over its only axis."""
    chosen = None if dim is None else dim % len(layout.shape)
    return replace(layout, dims=tuple((0,) if at == chosen else () for at in range(len(layout.shape))))


def _listed(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
