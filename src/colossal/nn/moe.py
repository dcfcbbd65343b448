"""Mixtures of experts: tokens travel to the ranks whose experts a router chose, and back."""

from colossal._src.nn.moe import (
    Dispatched,
    combine,
    dispatch,
    shard_experts,
)

__all__ = ["Dispatched", "combine", "dispatch", "shard_experts"]
