"""GPT-2, whose linear layers have transposed weights, and whose query, key and value are one layer."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

GPT2 = ParallelPlan(
    styles={
        "wte": "vocab",
        "h.*.attn.c_attn": "col/3",
        "h.*.attn.c_proj": "row",
        "h.*.mlp.c_fc": "col",
        "h.*.mlp.c_proj": "row",
        "?h.*.crossattention.q_attn": "col",
        "?h.*.crossattention.c_attn": "col/2",
        "?h.*.crossattention.c_proj": "row",
    },
    beside={"lm_head": "head"},
    divide_by_tp=(
        "h.*.attn.num_heads", "h.*.attn.split_size",
        "?h.*.crossattention.num_heads", "?h.*.crossattention.split_size",
    ),
    counts=(HeadCounts("n_head"),),
    stages=Stages("h", first=("wte", "wpe"), reshapes=True),
    attention="h.*.attn",
)  # fmt: skip


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return GPT2
