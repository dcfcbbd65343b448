"""Whisper."""

from typing import Any

from colossal.tensor import HeadCounts, ParallelPlan, Stages

WHISPER = ParallelPlan(
    styles={
        "?decoder.embed_tokens": "vocab",
        "*.layers.*.self_attn.[qkv]_proj": "col",
        "*.layers.*.self_attn.out_proj": "row",
        "?decoder.layers.*.encoder_attn.[qkv]_proj": "col",
        "?decoder.layers.*.encoder_attn.out_proj": "row",
        "*.layers.*.fc1": "col",
        "*.layers.*.fc2": "row",
    },
    beside={"proj_out": "col+"},
    divide_by_tp=(
        "*.layers.*.self_attn.num_heads", "*.layers.*.self_attn.embed_dim",
        "?decoder.layers.*.encoder_attn.num_heads", "?decoder.layers.*.encoder_attn.embed_dim",
    ),
    counts=(HeadCounts("encoder_attention_heads"), HeadCounts("decoder_attention_heads")),
    stages=Stages(
        "decoder.layers", first=("decoder.embed_tokens", "decoder.embed_positions"), may_be_missing=True,
        before=Stages(
            "encoder.layers", first=("encoder.conv1", "encoder.conv2", "encoder.embed_positions"), result="encoder",
            may_be_missing=True,
        ),
    ),
)  # fmt: skip


def plan(config: Any) -> ParallelPlan:  # noqa: ARG001 (all alike)
    """Return the plan of a configuration."""
    return WHISPER
