"""Llama, and what differs from it in numbers only: Mistral, Qwen2, Cohere."""

from typing import Any

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

LLAMA = ParallelPlan(
    styles={
        "embed_tokens": "vocab",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.[kv]_proj": "colwise_kv",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
    head_styles={"lm_head": "lm_head"},
    counts=(HeadCounts("num_attention_heads", "num_key_value_heads"),),
    stages=Stages("layers", pre_layers=("embed_tokens",)),
    attention="layers.*.self_attn",
)


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (the same for all)
    """Return the plan of a configuration."""
    return LLAMA
