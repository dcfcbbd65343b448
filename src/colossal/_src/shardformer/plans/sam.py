"""SAM, whose images have the same relative positions for all heads, and whose masks have three kinds of attention."""

from colossal._src.shardformer.plans._submodel import submodel_plan
from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

SAM = ParallelPlan(
    styles={
        "vision_encoder.layers.*.attn": "replicated_with_grad_allreduce",
        "vision_encoder.layers.*.attn.qkv": "packed_colwise(3)",
        "vision_encoder.layers.*.attn.proj": "rowwise",
        "vision_encoder.layers.*.mlp.lin1": "colwise",
        "vision_encoder.layers.*.mlp.lin2": "rowwise",
        "mask_decoder.transformer.layers.*.*_att*.[qkv]_proj": "colwise",
        "mask_decoder.transformer.layers.*.*_att*.out_proj": "rowwise",
        "mask_decoder.transformer.layers.*.mlp.lin1": "colwise",
        "mask_decoder.transformer.layers.*.mlp.lin2": "rowwise",
        "mask_decoder.transformer.final_attn_token_to_image.[qkv]_proj": "colwise",
        "mask_decoder.transformer.final_attn_token_to_image.out_proj": "rowwise",
    },
    divide_by_tp=(
        "vision_encoder.layers.*.attn.num_attention_heads",
        "mask_decoder.transformer.layers.*.*_att*.num_attention_heads",
        "mask_decoder.transformer.final_attn_token_to_image.num_attention_heads",
    ),
    counts=(HeadCounts("vision_config.num_attention_heads"), HeadCounts("mask_decoder_config.num_attention_heads")),
    stages=Stages("vision_encoder.layers", pre_layers=("vision_encoder.patch_embed", "vision_encoder.pos_embed")),
)  # fmt: skip
SAM_VISION = submodel_plan(SAM, "vision_encoder.", is_inside=False)
