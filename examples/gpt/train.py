"""Train GPT-2 on the source code of Python's standard library.

torchrun --standalone --nproc_per_node=2 -m examples.gpt.train --tp-size 2
"""

from typing import Any

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import colossal
from examples.common.loop import run
from examples.common.options import parse
from examples.common.text import causal_samples

LENGTH = {"tiny": 32, "small": 256, "gpt2": 1024}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "initializer_range": 0.06},
    "small": {"n_embd": 256, "n_layer": 6, "n_head": 8, "vocab_size": 4096},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50304},
}


def make_model(size: str) -> nn.Module:
    """Build the model of a size, from its configuration."""
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**tokens, n_positions=LENGTH[size], **SIZES[size]))


def main() -> None:
    """Train as the command line says."""
    options = parse("Train GPT-2 on the source code of Python.", list(SIZES), lr=3e-3)
    colossal.launch_from_torch(verbose=False)
    samples = causal_samples(SIZES[options.size]["vocab_size"], LENGTH[options.size])
    run(lambda: make_model(options.size), samples, options)


if __name__ == "__main__":
    main()
