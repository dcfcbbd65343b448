"""BLIP-2: a vision model, a Q-Former, and a language model of another family."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from colossal.shardformer.plans._part import plan_of_part
from colossal.shardformer.plans.t5 import GIVES
from colossal.tensor import HeadCounts, ParallelPlan, Stages

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


SEEN = Stages("vision_model.encoder.layers", first=("vision_model.embeddings",), result="vision_model")
ASKED = Stages("qformer.encoder.layer", first=("qformer.layernorm", "query_tokens"), result="qformer", before=SEEN)
READ = Stages(
    "language_model.encoder.block",
    first=("language_model.shared", "language_model.encoder.embed_tokens", "language_projection"),
    gives=GIVES,
    result="language_model.encoder",
    before=ASKED,
)
STAGES: Mapping[str, Stages] = {  # by the family of the language model
    "opt": Stages(
        "language_model.model.decoder.layers",
        first=(
            *(f"language_model.model.decoder.{name}" for name in ("embed_tokens", "embed_positions", "project_in")),
            "language_projection",
        ),
        before=ASKED,
    ),
    "t5": Stages(
        "language_model.decoder.block", first=("language_model.decoder.embed_tokens",), gives=GIVES, before=READ
    ),
}
_PARTS = {"blip_2_vision_model": "vision_model.", "blip_2_qformer": "qformer."}


def plan(config: Any) -> ParallelPlan:
    """Return the plan of a configuration."""
    part = _PARTS.get(config.model_type)
    if part:
        return plan_of_part(BLIP_2, part)
    return replace(BLIP_2, stages=STAGES.get(config.text_config.model_type))
