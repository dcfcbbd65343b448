"""Mixtures of experts: tokens travel to the ranks whose experts a router chose, and back."""

from colossal._src.nn.moe import (
    Capacity,
    Dispatched,
    FeedForwardExperts,
    GaussianNoise,
    GroupLimit,
    MixtureOfExperts,
    Router,
    RouterLosses,
    Routing,
    StackedExperts,
    UniformNoise,
    combine,
    dispatch,
    shard_experts,
    update_expert_biases,
)

__all__ = [
    "Capacity",
    "Dispatched",
    "FeedForwardExperts",
    "GaussianNoise",
    "GroupLimit",
    "MixtureOfExperts",
    "Router",
    "RouterLosses",
    "Routing",
    "StackedExperts",
    "UniformNoise",
    "combine",
    "dispatch",
    "shard_experts",
    "update_expert_biases",
]
