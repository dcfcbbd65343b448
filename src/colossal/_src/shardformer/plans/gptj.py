"""GPT-J."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

GPTJ = ParallelPlan(
    styles={
        "wte": "vocab",
        "h.*.attn.[qkv]_proj": "colwise",
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    },
    head_styles={"lm_head": "lm_head"},
    divide_by_tp=("h.*.attn.num_attention_heads", "h.*.attn.embed_dim"),
    counts=(HeadCounts("n_head"),),
    stages=Stages("h", pre_layers=("wte",), layer_outputs=("hidden_states", ""), reshapes=True),
    attention="h.*.attn",
)
