"""GPT-J."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

GPTJ = ParallelPlan(
    styles={
        "wte": "vocab",
        "h.*.attn.[qkv]_proj": "col",
        "h.*.attn.out_proj": "row",
        "h.*.mlp.fc_in": "col",
        "h.*.mlp.fc_out": "row",
    },
    beside={"lm_head": "head"},
    divide_by_tp=("h.*.attn.num_attention_heads", "h.*.attn.embed_dim"),
    counts=(HeadCounts("n_head"),),
    stages=Stages("h", first=("wte",), gives=("hidden_states", ""), reshapes=True),
    attention="h.*.attn",
)


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return GPTJ
