"""Mixtures of experts: tokens travel to the ranks whose experts a router chose, and back."""

from colossal._src.nn.moe.dispatch import Dispatched, combine, dispatch
from colossal._src.nn.moe.expert_parallel import ExpertParallel, shard_experts

__all__ = ["Dispatched", "ExpertParallel", "combine", "dispatch", "shard_experts"]
