"""ViT."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

VIT = ParallelPlan(
    styles={
        "layers.*.attention.[qkv]_proj": "col",
        "layers.*.attention.o_proj": "row",
        "layers.*.mlp.fc1": "col",
        "layers.*.mlp.fc2": "row",
    },
    divide_by_tp=("layers.*.attention.num_attention_heads",),
    counts=(HeadCounts(),),
    stages=Stages("layers", first=("embeddings",)),
    attention="layers.*.attention",
)


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return VIT
