"""ViT."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

VIT = ParallelPlan(
    styles={
        "layers.*.attention.[qkv]_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
    divide_by_tp=("layers.*.attention.num_attention_heads",),
    counts=(HeadCounts(),),
    stages=Stages("layers", pre_layers=("embeddings",)),
    attention="layers.*.attention",
)
