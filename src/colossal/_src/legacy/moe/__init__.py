"""Mixtures of experts of the older API, over `colossal._src.nn.moe`."""

from colossal._src.legacy.moe.context import MOE_CONTEXT, MoeContext, MoeCrossEntropyLoss, MoeLoss, moe_set_seed
from colossal._src.legacy.moe.layers import Experts, FFNExperts, MoeLayer, MoeModule
from colossal._src.legacy.moe.routers import (
    NormalNoiseGenerator,
    Top1Router,
    Top2Router,
    TopKRouter,
    UniformNoiseGenerator,
)
from colossal._src.legacy.moe.sparse_mlp import MLPExperts, SparseMLP

__all__ = [
    "MOE_CONTEXT",
    "Experts",
    "FFNExperts",
    "MLPExperts",
    "MoeContext",
    "MoeCrossEntropyLoss",
    "MoeLayer",
    "MoeLoss",
    "MoeModule",
    "NormalNoiseGenerator",
    "SparseMLP",
    "Top1Router",
    "Top2Router",
    "TopKRouter",
    "UniformNoiseGenerator",
    "moe_set_seed",
]
