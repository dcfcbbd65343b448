"""Policies of a user for ShardFormer, and the loss over a sharded vocabulary, by their older names."""

from colossal._src.legacy.shardformer.cross_entropy import cross_entropy_1d, dist_log_prob_1d
from colossal._src.legacy.shardformer.policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    read_policy,
)

__all__ = [
    "ModulePolicyDescription",
    "Policy",
    "SubModuleReplacementDescription",
    "cross_entropy_1d",
    "dist_log_prob_1d",
    "read_policy",
]
