"""Mixtures of experts: tokens travel to the ranks whose experts a router chose, and back."""

from colossal._src.nn.moe.dispatch import Dispatched, combine, dispatch, num_experts_of_rank
from colossal._src.nn.moe.expert_parallel import Exchange, ExpertParallel, check_exchange, shard_experts
from colossal._src.nn.moe.experts import FeedForwardExperts, StackedExperts
from colossal._src.nn.moe.feature_parallel import shard_features
from colossal._src.nn.moe.mixture import MixtureOfExperts
from colossal._src.nn.moe.noise import GaussianNoise, UniformNoise
from colossal._src.nn.moe.padded_experts import PaddedExperts, pad_experts
from colossal._src.nn.moe.router import GroupLimit, Router, RouterLosses, update_expert_biases
from colossal._src.nn.moe.routing import Capacity, Routing

__all__ = [
    "Capacity",
    "Dispatched",
    "Exchange",
    "ExpertParallel",
    "FeedForwardExperts",
    "GaussianNoise",
    "GroupLimit",
    "MixtureOfExperts",
    "PaddedExperts",
    "Router",
    "RouterLosses",
    "Routing",
    "StackedExperts",
    "UniformNoise",
    "check_exchange",
    "combine",
    "dispatch",
    "num_experts_of_rank",
    "pad_experts",
    "shard_experts",
    "shard_features",
    "update_expert_biases",
]
