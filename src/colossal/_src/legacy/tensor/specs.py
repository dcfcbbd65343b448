"""How a tensor is distributed over the ranks of its group, and how operators use it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import final

from colossal._src.legacy.tensor.process_group import ProcessGroup
from colossal._src.tensor import Layout
from colossal.errors import PlanError, UnsupportedError


@final
class DistPlacementPattern(Enum):
    """Whether the tensor-parallel ranks hold replicas or shards.

    Attributes:
        REPLICATE: Each holds the full tensor.
        SHARD: Each holds a shard.

    Example:
        >>> from colossal.legacy.tensor import DistPlacementPattern, ReplicaSpec
        >>> ReplicaSpec().placement is DistPlacementPattern.REPLICATE
        True
    """

    REPLICATE = "r"
    SHARD = "s"


@dataclass(frozen=True)
class _DistSpec:
    """How the tensor-parallel ranks hold a tensor."""

    dims: tuple[int, ...] = ()
    num_partitions: tuple[int, ...] = ()

    @property
    def placement(self) -> DistPlacementPattern:
        """Whether it is replicated or sharded."""
        return DistPlacementPattern.SHARD if self.dims else DistPlacementPattern.REPLICATE


class ShardSpec(_DistSpec):
    """Shards a tensor along one dimension over its tensor-parallel ranks.

    Superseded by `colossal.tensor.Layout`.

    Args:
        dims: The dimension, in a list; negative numbers count from the last.
        num_partitions: The number of shards, in a list: the tensor-parallel degree of the tensor's group.

    Raises:
        UnsupportedError: There are several dimensions.
        PlanError: There are not as many numbers as dimensions.

    Example:
        >>> from colossal.legacy.tensor import ShardSpec
        >>> ShardSpec(dims=[-1], num_partitions=[2])
        ShardSpec(dims=(-1,), num_partitions=(2,))
    """

    def __init__(self, dims: Sequence[int], num_partitions: Sequence[int]) -> None:
        if len(dims) > 1:
            raise UnsupportedError(
                f"A ShardSpec shards one dimension. Found dims={list(dims)}. Pass one, or use a Layout of "
                "colossal.tensor, which shards several."
            )
        if len(dims) != len(num_partitions) or not dims:
            raise PlanError(
                "A ShardSpec has a dimension, and how many shards it has. Found "
                f"dims={list(dims)} and num_partitions={list(num_partitions)}. Pass lists of one number."
            )
        super().__init__(tuple(dims), tuple(num_partitions))

    def __repr__(self) -> str:
        return f"ShardSpec(dims={self.dims}, num_partitions={self.num_partitions})"


class ReplicaSpec(_DistSpec):
    """Each rank holds the full tensor.

    Superseded by `colossal.tensor.Layout`.

    Example:
        >>> from colossal.legacy.tensor import ReplicaSpec
        >>> ReplicaSpec()
        ReplicaSpec()
    """

    def __init__(self) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return "ReplicaSpec()"


DistSpec = ShardSpec | ReplicaSpec


@final
class ComputePattern(Enum):
    """The kind of parallelism in which operators use a parameter.

    Its first member is the only one that operators distinguish, 1D tensor parallelism: what an operator does follows
    from the layouts of its tensors.

    Example:
        >>> from colossal.legacy.tensor import ComputePattern
        >>> ComputePattern.TP1D.name
        'TP1D'

    Attributes:
        TP1D: 1D tensor parallelism.
        TP2D: 2D tensor parallelism.
        TP2P5D: 2.5D tensor parallelism.
        TP3D: 3D tensor parallelism.
    """

    TP1D = 0
    TP2D = 1
    TP2P5D = 2
    TP3D = 3


@final
class ComputeSpec:
    """How operators use a parameter.

    Superseded by the styles of a `colossal.tensor.ParallelPlan`.

    Args:
        compute_pattern: `ComputePattern.TP1D`.

    Attributes:
        output_replicate: Whether the output of a column-parallel product or lookup is gathered, which is the default,
            or stays sharded along its last dimension.

    Raises:
        UnsupportedError: It is another pattern.

    Example:
        >>> from colossal.legacy.tensor import ComputePattern, ComputeSpec
        >>> spec = ComputeSpec(ComputePattern.TP1D)
        >>> spec.set_output_replicate(False)
        >>> spec.output_replicate
        False
    """

    def __init__(self, compute_pattern: ComputePattern) -> None:
        if compute_pattern is not ComputePattern.TP1D:
            raise UnsupportedError(
                f"Tensors with a layout are computed with in 1D. Found {compute_pattern}. Pass ComputePattern.TP1D, or "
                "use the layers of colossal.nn on ParallelMesh(tp=4, tp_mode='2d')."
            )
        self.compute_pattern = compute_pattern
        self.output_replicate = True

    def __repr__(self) -> str:
        return f"ComputeSpec({self.compute_pattern}, output_replicate={self.output_replicate})"

    def set_output_replicate(self, flag: bool = True) -> None:
        """Choose whether the output is gathered.

        Args:
            flag: Whether it is.
        """
        self.output_replicate = flag


@dataclass
class ColoTensorSpec:
    """Everything that a `ColoTensor` knows in addition to its values.

    Args:
        pg: Its ranks.
        dist_attr: How they hold it; replicated by default.
        compute_attr: How operators use it.

    Example:
        >>> from colossal.legacy.tensor import ColoTensorSpec, ProcessGroup
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     ColoTensorSpec(ProcessGroup(tp_degree=2)).dist_attr
        ReplicaSpec()
    """

    pg: ProcessGroup
    dist_attr: DistSpec = field(default_factory=ReplicaSpec)
    compute_attr: ComputeSpec | None = None


def layout_for(spec: DistSpec, shape: Sequence[int], group: ProcessGroup) -> Layout:
    """Return the layout over the tp axis of a tensor with this full shape."""
    dims: list[tuple[int, ...]] = [()] * len(shape)
    if spec.dims:
        (dim,), (number,) = spec.dims, spec.num_partitions
        if number != group.tp_world_size():
            raise PlanError(
                f"A tensor has as many shards as its group has tensor-parallel ranks, {group.tp_world_size()}. Found "
                f"num_partitions=[{number}]. Pass [pg.tp_world_size()]."
            )
        if not -len(shape) <= dim < len(shape):
            raise PlanError(
                f"The dimension that is sharded is one of the tensor's. Found dims=[{dim}] for the shape "
                f"{tuple(shape)}. Pass one of its {len(shape)} dimensions."
            )
        dims[dim % len(shape)] = (0,)
    return Layout(tuple(shape), group.mesh.ranks("tp"), (group.tp_world_size(),), tuple(dims), axes=("tp",))


def sharded_dim(layout: Layout) -> int | None:
    """Return the dimension that the tp axis shards; None if there is none, or one rank has all of it."""
    found = [dim for dim, axes in enumerate(layout.dims) if axes]
    return found[0] if found and layout.grid[0] > 1 else None


def spec_of(layout: Layout) -> DistSpec:
    """Write a layout as a spec; the last dimension of several is -1, so that views that keep it have the same spec."""
    last = len(layout.dims) - 1
    found = [-1 if dim == last > 0 else dim for dim, axes in enumerate(layout.dims) if axes]
    return ShardSpec(found, [layout.grid[0]]) if found else ReplicaSpec()
