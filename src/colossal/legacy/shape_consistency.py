"""Shardings of tensors of known shape over a `DeviceMesh`, and the collectives that convert between them."""

from colossal._src.legacy.tensor import CollectiveCommPattern, CommSpec, MeshShardingSpec, ShapeConsistencyManager

__all__ = ["CollectiveCommPattern", "CommSpec", "MeshShardingSpec", "ShapeConsistencyManager"]
