"""DeepSeek-V3, whose keys and values come from few features, some of which all heads use as they are."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

DEEPSEEK_V3 = ParallelPlan(
    styles={
        "embed_tokens": "vocab",
        "?layers.*.self_attn.q_proj": "colwise",
        "?layers.*.self_attn.q_b_proj": "colwise",
        "layers.*.self_attn.kv_a_proj_with_mqa": "replicate",
        "layers.*.self_attn.kv_a_layernorm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.kv_b_proj": "colwise_no_reduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "?layers.*.mlp.gate_proj": "colwise",
        "?layers.*.mlp.up_proj": "colwise",
        "?layers.*.mlp.down_proj": "rowwise",
        "?layers.*.mlp.experts": "moe_tp_experts",
        "?layers.*.mlp.shared_experts.gate_proj": "colwise",
        "?layers.*.mlp.shared_experts.up_proj": "colwise",
        "?layers.*.mlp.shared_experts.down_proj": "rowwise",
    },
    head_styles={"lm_head": "lm_head"},
    counts=(HeadCounts(),),
    stages=Stages("layers", pre_layers=("embed_tokens",)),
    attention="layers.*.self_attn",
)
