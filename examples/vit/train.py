"""Train a vision transformer on scikit-learn's handwritten digits.

torchrun --standalone --nproc_per_node=2 -m examples.vit.train --pp-size 2
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import colossal
from examples.common.loop import run
from examples.common.options import parse
from examples.common.text import Samples

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
    "base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}


def make_samples() -> Samples:
    """Return 1797 images of 8 x 8 pixels."""
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return Samples(pixel_values=images, labels=torch.tensor(digits.target))


def make_model(size: str) -> nn.Module:
    """Build the model of a size, from its configuration."""
    images: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**images, initializer_range=0.1, **SIZES[size]))


def main() -> None:
    """Train as the command line says."""
    options = parse("Train a vision transformer on handwritten digits.", list(SIZES), lr=3e-3)
    colossal.launch_from_torch(verbose=False)
    run(lambda: make_model(options.size), make_samples(), options)


if __name__ == "__main__":
    main()
