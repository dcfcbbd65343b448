"""Llama, what differs from it in numbers only (Mistral, Qwen2, Cohere), and what has other layers in some places."""

from dataclasses import replace

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
_ATTENTION = {row: style for row, style in LLAMA.styles.items() if ".mlp." not in row}

QWEN3 = replace(LLAMA, styles={**LLAMA.styles, "layers.*.self_attn.[qk]_norm": "replicated_with_grad_allreduce"})
"""With a norm of each head, with the same weight for all heads."""

GLM = replace(
    LLAMA,
    styles={
        **_ATTENTION,
        "layers.*.mlp.gate_up_proj": "packed_colwise(2)",
        "layers.*.mlp.down_proj": "rowwise",
    },
)
"""Whose gate and up projections are one layer."""

MIXTRAL = replace(LLAMA, styles={**_ATTENTION, "layers.*.mlp.experts": "moe_tp_experts"})
"""With experts whose features are sharded."""

OLMOE = replace(
    MIXTRAL,
    styles={
        **MIXTRAL.styles,
        "layers.*.self_attn.q_proj": "colwise_gather_output",
        "layers.*.self_attn.[kv]_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
    },
    counts=(HeadCounts(is_sharded=False),),
)
"""With norms over all heads, so that each rank computes attention with all of them."""
