"""BERT."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

BERT = ParallelPlan(
    styles={
        "embeddings.word_embeddings": "vocab",
        "encoder.layer.*.attention.self.[qkv]*": "col",
        "encoder.layer.*.attention.output.dense": "row",
        "encoder.layer.*.intermediate.dense": "col",
        "encoder.layer.*.output.dense": "row",
    },
    beside={"cls.predictions.decoder": "col+"},
    divide_by_tp=("encoder.layer.*.attention.self.num_attention_heads", "encoder.layer.*.attention.self.all_head_size"),
    counts=(HeadCounts(),),
    stages=Stages("encoder.layer", first=("embeddings",)),
    attention="encoder.layer.*.attention.self",
)


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return BERT
