"""Tensors that know how they are distributed over the ranks of a group."""

from colossal._src.legacy.tensor import (
    ColoInitContext,
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    DistPlacementPattern,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)

__all__ = [
    "ColoInitContext",
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "ComputePattern",
    "ComputeSpec",
    "DistPlacementPattern",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
]
