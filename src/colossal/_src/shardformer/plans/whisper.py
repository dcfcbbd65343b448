"""Whisper."""

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

WHISPER = ParallelPlan(
    styles={
        "?decoder.embed_tokens": "vocab",
        "*.layers.*.self_attn.[qkv]_proj": "colwise",
        "*.layers.*.self_attn.out_proj": "rowwise",
        "?decoder.layers.*.encoder_attn.[qkv]_proj": "colwise",
        "?decoder.layers.*.encoder_attn.out_proj": "rowwise",
        "*.layers.*.fc1": "colwise",
        "*.layers.*.fc2": "rowwise",
    },
    head_styles={"proj_out": "colwise_gather_output"},
    divide_by_tp=(
        "*.layers.*.self_attn.num_heads", "*.layers.*.self_attn.embed_dim",
        "?decoder.layers.*.encoder_attn.num_heads", "?decoder.layers.*.encoder_attn.embed_dim",
    ),
    counts=(HeadCounts("encoder_attention_heads"), HeadCounts("decoder_attention_heads")),
    stages=Stages(
        "decoder.layers", pre_layers=("decoder.embed_tokens", "decoder.embed_positions"), may_be_missing=True,
        previous=Stages(
            "encoder.layers", pre_layers=("encoder.conv1", "encoder.conv2", "encoder.embed_positions"),
            result="encoder", may_be_missing=True,
        ),
    ),
)  # fmt: skip
