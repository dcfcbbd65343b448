"""GPT-2, whose linear layers have transposed weights, and whose query, key and value are one layer."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

GPT2 = ParallelPlan(
    styles={
        "wte": "vocab",
        "h.*.attn.c_attn": "packed_colwise(3)",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
        "?h.*.crossattention.q_attn": "colwise",
        "?h.*.crossattention.c_attn": "packed_colwise(2)",
        "?h.*.crossattention.c_proj": "rowwise",
    },
    head_styles={"lm_head": "lm_head"},
    divide_by_tp=(
        "h.*.attn.num_heads", "h.*.attn.split_size",
        "?h.*.crossattention.num_heads", "?h.*.crossattention.split_size",
    ),
    counts=(HeadCounts("n_head"),),
    stages=Stages("h", pre_layers=("wte", "wpe"), reshapes=True),
    attention="h.*.attn",
)  # fmt: skip
