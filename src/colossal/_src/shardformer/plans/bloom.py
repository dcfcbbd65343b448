"""BLOOM, whose query, key and value are interleaved by head, and whose positions are a bias for each head (ALiBi)."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

BLOOM = ParallelPlan(
    styles={
        "word_embeddings": "vocab",
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    },
    head_styles={"lm_head": "lm_head"},
    divide_by_tp=tuple(f"h.*.self_attention.{name}" for name in ("num_heads", "hidden_size", "split_size")),
    counts=(HeadCounts("n_head"),),
    split_inputs={"h.*.self_attention": ("alibi",)},
    stages=Stages(
        "h", pre_layers=("word_embeddings", "word_embeddings_layernorm"), layer_outputs=("hidden_states", "")
    ),
    attention="h.*.self_attention",
)
