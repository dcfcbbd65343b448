"""Qwen3: Llama with a norm of each head, with the same weight for all heads."""

from dataclasses import replace
from typing import Any

from colossal._src.shardformer.plans.llama import LLAMA
from colossal._src.tensor import ParallelPlan

QWEN3 = replace(LLAMA, styles={**LLAMA.styles, "layers.*.self_attn.[qk]_norm": "replicated_with_grad_allreduce"})


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (the same for all)
    """Return the plan of a configuration."""
    return QWEN3
