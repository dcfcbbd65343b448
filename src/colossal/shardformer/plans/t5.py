"""T5, whose positions are a table of heads."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

GIVES = ("hidden_states", "position_bias", "")  # the first block of a list makes the bias of all

T5 = ParallelPlan(
    styles={
        "*.block.*.layer.*.SelfAttention.[qkv]": "col",
        "*.block.*.layer.*.SelfAttention.o": "row",
        "*.block.0.layer.0.SelfAttention.relative_attention_bias": "heads",
        "?decoder.block.*.layer.*.EncDecAttention.[qkv]": "col",
        "?decoder.block.*.layer.*.EncDecAttention.o": "row",
        "*.block.*.layer.*.DenseReluDense.wi*": "col",
        "*.block.*.layer.*.DenseReluDense.wo": "row",
        "shared": "vocab",
        "*.embed_tokens": "vocab",
    },
    beside={"lm_head": "col+"},
    divide_by_tp=(
        "*.block.*.layer.*.SelfAttention.n_heads", "*.block.*.layer.*.SelfAttention.inner_dim",
        "?decoder.block.*.layer.*.EncDecAttention.n_heads", "?decoder.block.*.layer.*.EncDecAttention.inner_dim",
    ),
    counts=(HeadCounts("num_heads"),),
    stages=Stages(
        "decoder.block", first=("decoder.embed_tokens",), gives=GIVES,
        before=Stages("encoder.block", first=("encoder.embed_tokens", "shared"), gives=GIVES, result="encoder"),
    ),
)  # fmt: skip


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return T5
