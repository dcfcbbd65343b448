"""GLM: Llama whose gate and up projections are one layer."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

GLM = ParallelPlan(
    styles={
        "embed_tokens": "vocab",
        "layers.*.self_attn.q_proj": "col",
        "layers.*.self_attn.[kv]_proj": "kv",
        "layers.*.self_attn.o_proj": "row",
        "layers.*.mlp.gate_up_proj": "col/2",
        "layers.*.mlp.down_proj": "row",
    },
    beside={"lm_head": "head"},
    counts=(HeadCounts("num_attention_heads", "num_key_value_heads"),),
    stages=Stages("layers", first=("embed_tokens",)),
    attention="layers.*.self_attn",
)


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return GLM
