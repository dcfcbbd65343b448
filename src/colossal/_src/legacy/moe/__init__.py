"""Mixtures of experts of the older API, over `colossal._src.nn.moe`."""

from colossal._src.legacy.moe.base_experts import BaseExperts, MoeParallelInfo
from colossal._src.legacy.moe.context import MOE_CONTEXT, MoeContext, MoeCrossEntropyLoss, MoeLoss, moe_set_seed
from colossal._src.legacy.moe.expert_blocks import EPDeepseekMoE, EpDeepseekV3MoE, EPMixtralSparseMoeBlock
from colossal._src.legacy.moe.layers import Experts, FFNExperts, MoeLayer, MoeModule
from colossal._src.legacy.moe.load_balance import LoadBalancer, apply_load_balance
from colossal._src.legacy.moe.manager import MOE_MANAGER, MoEManager
from colossal._src.legacy.moe.routers import (
    NormalNoiseGenerator,
    Top1Router,
    Top2Router,
    TopKRouter,
    UniformNoiseGenerator,
)
from colossal._src.legacy.moe.sparse_mlp import MLPExperts, SparseMLP
from colossal._src.legacy.moe.tp_experts import TPExperts, build_ffn_experts

__all__ = [
    "MOE_CONTEXT",
    "MOE_MANAGER",
    "BaseExperts",
    "EPDeepseekMoE",
    "EPMixtralSparseMoeBlock",
    "EpDeepseekV3MoE",
    "Experts",
    "FFNExperts",
    "LoadBalancer",
    "MLPExperts",
    "MoEManager",
    "MoeContext",
    "MoeCrossEntropyLoss",
    "MoeLayer",
    "MoeLoss",
    "MoeModule",
    "MoeParallelInfo",
    "NormalNoiseGenerator",
    "SparseMLP",
    "TPExperts",
    "Top1Router",
    "Top2Router",
    "TopKRouter",
    "UniformNoiseGenerator",
    "apply_load_balance",
    "build_ffn_experts",
    "moe_set_seed",
]
