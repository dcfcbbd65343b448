"""DeepSeek-V3, whose keys and values come from few features, some of which all heads use as they are."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

DEEPSEEK_V3 = ParallelPlan(
    styles={
        "embed_tokens": "vocab",
        "?layers.*.self_attn.q_proj": "col",
        "?layers.*.self_attn.q_b_proj": "col",
        "layers.*.self_attn.kv_a_proj_with_mqa": "whole",
        "layers.*.self_attn.kv_a_layernorm": "shared",
        "layers.*.self_attn.kv_b_proj": "col-",
        "layers.*.self_attn.o_proj": "row",
        "?layers.*.mlp.gate_proj": "col",
        "?layers.*.mlp.up_proj": "col",
        "?layers.*.mlp.down_proj": "row",
        "?layers.*.mlp.experts": "experts",
        "?layers.*.mlp.shared_experts.gate_proj": "col",
        "?layers.*.mlp.shared_experts.up_proj": "col",
        "?layers.*.mlp.shared_experts.down_proj": "row",
    },
    beside={"lm_head": "head"},
    counts=(HeadCounts(),),
    stages=Stages("layers", first=("embed_tokens",)),
    attention="layers.*.self_attn",
)


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return DEEPSEEK_V3
