"""BERT."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

BERT = ParallelPlan(
    styles={
        "embeddings.word_embeddings": "vocab",
        "encoder.layer.*.attention.self.[qkv]*": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    head_styles={"cls.predictions.decoder": "colwise_gather_output"},
    divide_by_tp=("encoder.layer.*.attention.self.num_attention_heads", "encoder.layer.*.attention.self.all_head_size"),
    counts=(HeadCounts(),),
    stages=Stages("encoder.layer", pre_layers=("embeddings",)),
    attention="encoder.layer.*.attention.self",
)
