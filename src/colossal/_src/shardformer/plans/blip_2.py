"""BLIP-2: a vision model, a Q-Former, and a language model of another family."""

from dataclasses import replace
from typing import Any

from colossal._src.shardformer.plans._submodel import submodel_plan
from colossal._src.shardformer.plans.t5 import LAYER_OUTPUTS
from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

BLIP_2 = ParallelPlan(
    styles={
        "?vision_model.encoder.layers.*.self_attn": "split_input",
        "?vision_model.encoder.layers.*.self_attn.qkv": "packed_colwise(3)",
        "?vision_model.encoder.layers.*.self_attn.projection": "rowwise",
        "?vision_model.encoder.layers.*.mlp.fc1": "colwise",
        "?vision_model.encoder.layers.*.mlp.fc2": "rowwise",
        "?embeddings.word_embeddings": "vocab",
        "?qformer.encoder.layer.*.*attention.attention.[qkv]*": "colwise",
        "?qformer.encoder.layer.*.*attention.output.dense": "rowwise",
        "?qformer.encoder.layer.*.intermediate*.dense": "colwise",
        "?qformer.encoder.layer.*.output*.dense": "rowwise",
        "?language_projection": "colwise_gather_output",
    },
    divide_by_tp=("?vision_model.encoder.layers.*.self_attn.num_heads",),
    counts=(HeadCounts("vision_config.num_attention_heads"), HeadCounts("qformer_config.num_attention_heads")),
    nested=("?language_model",),
)


VISION_STAGES = Stages("vision_model.encoder.layers", pre_layers=("vision_model.embeddings",), result="vision_model")
QFORMER_STAGES = Stages(
    "qformer.encoder.layer", pre_layers=("qformer.layernorm", "query_tokens"), result="qformer", previous=VISION_STAGES
)
ENCODER_STAGES = Stages(
    "language_model.encoder.block", layer_outputs=LAYER_OUTPUTS, result="language_model.encoder",
    pre_layers=("language_model.shared", "language_model.encoder.embed_tokens", "language_projection"),
    previous=QFORMER_STAGES,
)  # fmt: skip
_OPT = "language_model.model.decoder."
STAGES = {  # by the family of the language model
    "opt": Stages(
        f"{_OPT}layers",
        pre_layers=(f"{_OPT}embed_tokens", f"{_OPT}embed_positions", f"{_OPT}project_in", "language_projection"),
        previous=QFORMER_STAGES,
    ),
    "t5": Stages(
        "language_model.decoder.block", pre_layers=("language_model.decoder.embed_tokens",),
        layer_outputs=LAYER_OUTPUTS, previous=ENCODER_STAGES,
    ),
}  # fmt: skip
BLIP_2_VISION = submodel_plan(BLIP_2, "vision_model.")
BLIP_2_QFORMER = submodel_plan(BLIP_2, "qformer.")


def blip_2_plan(config: Any) -> ParallelPlan:
    """Return the plan of a configuration, which says what the language model is."""
    return replace(BLIP_2, stages=STAGES.get(config.text_config.model_type))
