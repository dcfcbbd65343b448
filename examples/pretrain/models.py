"""Models of each family and size, from a configuration."""

from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

SIZES: dict[str, dict[str, tuple[int, int, int, int]]] = {  # layers, width, attention heads, width of the MLP
    "gpt2": {
        "tiny": (2, 64, 4, 256),
        "small": (6, 256, 8, 1024),
        "124m": (12, 768, 12, 3072),
        "355m": (24, 1024, 16, 4096),
        "774m": (36, 1280, 20, 5120),
        "1.5b": (48, 1600, 25, 6400),
    },
    "llama": {
        "tiny": (4, 64, 4, 176),
        "small": (6, 256, 8, 688),
        "1b": (16, 2048, 32, 8192),
        "8b": (32, 4096, 32, 14336),
    },
    "mixtral": {
        "tiny": (2, 64, 4, 128),
        "small": (6, 256, 8, 512),
        "8x7b": (32, 4096, 32, 14336),
        "8x22b": (56, 6144, 48, 16384),
    },
    "opt": {
        "tiny": (2, 64, 4, 256),
        "small": (6, 256, 8, 1024),
        "125m": (12, 768, 12, 3072),
        "1.3b": (24, 2048, 32, 8192),
        "6.7b": (32, 4096, 32, 16384),
    },
    "bert": {
        "tiny": (2, 64, 4, 256),
        "small": (6, 256, 8, 1024),
        "base": (12, 768, 12, 3072),
        "large": (24, 1024, 16, 4096),
    },
    "vit": {
        "tiny": (2, 32, 4, 128),
        "small": (6, 128, 8, 512),
        "base": (12, 768, 12, 3072),
        "large": (24, 1024, 16, 4096),
        "huge": (32, 1280, 16, 5120),
    },
}
PATCH_SIZES = {"tiny": 4, "small": 4, "base": 16, "large": 16, "huge": 14}
_DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "mixtral": ("attention_dropout",),
    "opt": ("dropout", "attention_dropout"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
_KINDS = {"bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}


def make_model(family: str, size: str, dropout: float, **inputs: Any) -> nn.Module:
    """Build a model with random weights; call it within `LazyInitContext`, so that each rank allocates its shard.

    Args:
        family: One of `SIZES`.
        size: One of its sizes.
        dropout: The probability of all its dropout layers.
        **inputs: What the configuration says about tokens or images.

    Returns:
        The model, which computes its loss from `labels`.
    """
    layers, width, heads, mlp_width = SIZES[family][size]
    options: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    # as the originals have it at a width of 768, and narrower ones learn nothing in a few steps with
    options["init_std" if family == "opt" else "initializer_range"] = 0.02 * max(1.0, 768 / width) ** 0.5
    options["ffn_dim" if family == "opt" else "n_inner" if family == "gpt2" else "intermediate_size"] = mlp_width
    options.update(dict.fromkeys(_DROPOUT[family], dropout), **inputs)
    if family in ("llama", "mixtral"):
        options["num_key_value_heads"] = 8 if width >= 2048 else heads // 2  # noqa: PLR2004 (grouped-query attention)
        rope_theta = 500_000.0 if family == "llama" else 1_000_000.0
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
        options["tie_word_embeddings"] = size == "1b"
    if family == "mixtral":
        options["num_local_experts"], options["num_experts_per_tok"] = 4 if size == "tiny" else 8, 2
    if family == "opt":
        options["word_embed_proj_dim"] = width
    config = AutoConfig.for_model(family, **options)
    kind: Any = _KINDS.get(family, AutoModelForCausalLM)
    return kind.from_config(config)
