"""Mixtures of experts by their older names: experts, routers, layers, and a context of what they have in common."""

from colossal._src.legacy.moe import (
    MOE_CONTEXT,
    Experts,
    FFNExperts,
    MLPExperts,
    MoeContext,
    MoeCrossEntropyLoss,
    MoeLayer,
    MoeLoss,
    MoeModule,
    NormalNoiseGenerator,
    SparseMLP,
    Top1Router,
    Top2Router,
    TopKRouter,
    UniformNoiseGenerator,
)

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
]
