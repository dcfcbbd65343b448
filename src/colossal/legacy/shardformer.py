"""Policies of a user for ShardFormer, which `read_policy` turns into plans, and a loss by its older name."""

from colossal._src.legacy.shardformer import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    cross_entropy_1d,
    dist_log_prob_1d,
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
