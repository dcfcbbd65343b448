"""T5, mT5 and UMT5, whose positions are a table of heads."""

from dataclasses import replace
from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

GIVES = ("hidden_states", "position_bias", "")  # the first block of a list makes the bias of all


def stages(gives: tuple[str, ...]) -> Stages:
    """Cut encoder and decoder, of which some heads have the former only."""
    encoder = Stages("encoder.block", first=("encoder.embed_tokens", "shared"), gives=gives, result="encoder")
    first = ("decoder.embed_tokens",)
    return Stages("decoder.block", first=first, gives=gives, before=encoder, may_be_missing=True)


T5 = ParallelPlan(
    styles={
        "*.block.*.layer.*.SelfAttention.[qkv]": "col",
        "*.block.*.layer.*.SelfAttention.o": "row",
        "*.block.*.layer.0.SelfAttention.relative_attention_bias": "heads",
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
    stages=stages(GIVES),
)  # fmt: skip
UMT5 = replace(T5, stages=stages(()))  # each block has a table of its own


def plan(config: Any) -> ParallelPlan:
    """Return the plan of a configuration."""
    return UMT5 if config.model_type == "umt5" else T5
