"""OPT."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

OPT = ParallelPlan(
    styles={
        "decoder.embed_tokens": "vocab",
        "decoder.layers.*.self_attn.[qkv]_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
    head_styles={"lm_head": "lm_head"},
    divide_by_tp=("decoder.layers.*.self_attn.num_heads", "decoder.layers.*.self_attn.embed_dim"),
    counts=(HeadCounts(),),
    stages=Stages(
        "decoder.layers", pre_layers=("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in")
    ),
    attention="decoder.layers.*.self_attn",
)
