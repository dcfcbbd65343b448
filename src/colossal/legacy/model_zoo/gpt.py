"""GPT, and the modules that it is made of: a stage of a pipeline can be built of them."""

from colossal._src.legacy.model_zoo import (
    GPT,
    GPTMLP,
    GPTBlock,
    GPTEmbedding,
    GPTLMHead,
    GPTLMLoss,
    GPTSelfAttention,
    gpt2_8b,
    gpt2_large,
    gpt2_medium,
    gpt2_small,
    gpt2_xl,
    gpt3,
)

__all__ = [
    "GPT",
    "GPTMLP",
    "GPTBlock",
    "GPTEmbedding",
    "GPTLMHead",
    "GPTLMLoss",
    "GPTSelfAttention",
    "gpt2_8b",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_small",
    "gpt2_xl",
    "gpt3",
]
