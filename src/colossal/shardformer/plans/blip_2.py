"""BLIP-2: a vision model, a Q-Former, and a language model of another family."""

from typing import Any

from colossal.shardformer.plans._part import plan_of_part
from colossal.tensor import HeadCounts, ParallelPlan

BLIP_2 = ParallelPlan(
    styles={
        "?vision_model.encoder.layers.*.self_attn": "cut",
        "?vision_model.encoder.layers.*.self_attn.qkv": "col/3",
        "?vision_model.encoder.layers.*.self_attn.projection": "row",
        "?vision_model.encoder.layers.*.mlp.fc1": "col",
        "?vision_model.encoder.layers.*.mlp.fc2": "row",
        "?embeddings.word_embeddings": "vocab",
        "?qformer.encoder.layer.*.*attention.attention.[qkv]*": "col",
        "?qformer.encoder.layer.*.*attention.output.dense": "row",
        "?qformer.encoder.layer.*.intermediate*.dense": "col",
        "?qformer.encoder.layer.*.output*.dense": "row",
        "?language_projection": "col+",
    },
    divide_by_tp=("?vision_model.encoder.layers.*.self_attn.num_heads",),
    counts=(HeadCounts("vision_config.num_attention_heads"), HeadCounts("qformer_config.num_attention_heads")),
    nested=("?language_model",),
)


_PARTS = {"blip_2_vision_model": "vision_model.", "blip_2_qformer": "qformer."}


def plan(config: Any) -> ParallelPlan:
    """Return the plan of a configuration."""
    part = _PARTS.get(config.model_type)
    return plan_of_part(BLIP_2, part) if part else BLIP_2
