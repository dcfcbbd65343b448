"""Train OPT on the source code of Python's standard library.

torchrun --standalone --nproc_per_node=2 -m examples.opt.train --tp-size 2
"""

from typing import Any

from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import colossal
from examples.common.loop import run
from examples.common.options import parse
from examples.common.text import causal_samples

LENGTH = {"tiny": 32, "small": 256, "125m": 1024}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "ffn_dim": 256,
        "word_embed_proj_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "init_std": 0.06,
    },
    "small": {
        "hidden_size": 256,
        "ffn_dim": 1024,
        "word_embed_proj_dim": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "vocab_size": 4096,
    },
    "125m": {
        "hidden_size": 768,
        "ffn_dim": 3072,
        "word_embed_proj_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50272,
    },
}


def make_model(size: str) -> nn.Module:
    """Build the model of a size, from its configuration."""
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return OPTForCausalLM(OPTConfig(**tokens, max_position_embeddings=LENGTH[size], **SIZES[size]))


def main() -> None:
    """Train as the command line says."""
    options = parse("Train OPT on the source code of Python.", list(SIZES), lr=3e-3)
    colossal.launch_from_torch(verbose=False)
    samples = causal_samples(SIZES[options.size]["vocab_size"], LENGTH[options.size])
    run(lambda: make_model(options.size), samples, options)


if __name__ == "__main__":
    main()
