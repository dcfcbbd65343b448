"""Mixtral: the attention of Llama, and experts whose features are sharded."""

from typing import Any

from colossal._src.shardformer.plans.llama import LLAMA
from colossal._src.tensor import ParallelPlan

MIXTRAL = ParallelPlan(
    styles={
        **{row: style for row, style in LLAMA.styles.items() if ".mlp." not in row},
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    head_styles=LLAMA.head_styles,
    counts=LLAMA.counts,
    stages=LLAMA.stages,
    attention=LLAMA.attention,
)


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (the same for all)
    """Return the plan of a configuration."""
    return MIXTRAL
