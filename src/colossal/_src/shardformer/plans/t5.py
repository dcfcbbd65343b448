"""T5, mT5 and UMT5, whose positions are a table of heads."""

from dataclasses import replace

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages

LAYER_OUTPUTS = ("hidden_states", "position_bias", "")  # the first block of a list makes the bias of all


def stages(layer_outputs: tuple[str, ...]) -> Stages:
    """Split encoder and decoder into stages; some heads have the former only."""
    encoder = Stages(
        "encoder.block", pre_layers=("encoder.embed_tokens", "shared"), layer_outputs=layer_outputs, result="encoder"
    )
    pre_layers = ("decoder.embed_tokens",)
    return Stages(
        "decoder.block", pre_layers=pre_layers, layer_outputs=layer_outputs, previous=encoder, may_be_missing=True
    )


T5 = ParallelPlan(
    styles={
        "*.block.*.layer.*.SelfAttention.[qkv]": "colwise",
        "*.block.*.layer.*.SelfAttention.o": "rowwise",
        "*.block.*.layer.0.SelfAttention.relative_attention_bias": "embedding_colwise",
        "?decoder.block.*.layer.*.EncDecAttention.[qkv]": "colwise",
        "?decoder.block.*.layer.*.EncDecAttention.o": "rowwise",
        "*.block.*.layer.*.DenseReluDense.wi*": "colwise",
        "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
        "shared": "vocab",
        "*.embed_tokens": "vocab",
    },
    head_styles={"lm_head": "colwise_gather_output"},
    divide_by_tp=(
        "*.block.*.layer.*.SelfAttention.n_heads", "*.block.*.layer.*.SelfAttention.inner_dim",
        "?decoder.block.*.layer.*.EncDecAttention.n_heads", "?decoder.block.*.layer.*.EncDecAttention.inner_dim",
    ),
    counts=(HeadCounts("num_heads"),),
    stages=stages(LAYER_OUTPUTS),
)  # fmt: skip
UMT5 = replace(T5, stages=stages(()))  # each block has a table of its own
