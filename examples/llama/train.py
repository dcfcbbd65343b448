"""Train LLaMA on the source code of Python's standard library.

torchrun --standalone --nproc_per_node=2 -m examples.llama.train --tp-size 2
"""

from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import colossal
from examples.common.loop import run
from examples.common.options import parse
from examples.common.text import causal_samples

LENGTH = {"tiny": 32, "small": 256, "1b": 1024}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "initializer_range": 0.06,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}


def make_model(size: str) -> nn.Module:
    """Build the model of a size, from its configuration."""
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**tokens, max_position_embeddings=LENGTH[size], **SIZES[size]))


def main() -> None:
    """Train as the command line says."""
    options = parse("Train LLaMA on the source code of Python.", list(SIZES), lr=3e-3)
    colossal.launch_from_torch(verbose=False)
    samples = causal_samples(SIZES[options.size]["vocab_size"], LENGTH[options.size])
    run(lambda: make_model(options.size), samples, options)


if __name__ == "__main__":
    main()
