"""The model that is trained, its data, and its arithmetic."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """A GPT-2 and its batch.

    Attributes:
        width: Features.
        layers: Number of blocks.
        vocabulary: Number of tokens there are.
        length: Tokens of a sequence.
        batch: Sequences of a rank.
    """

    width: int = 1024
    layers: int = 24
    vocabulary: int = 50304
    length: int = 1024
    batch: int = 4

    @property
    def num_parameters(self) -> int:
        """Those of the blocks, the final norm and both embeddings."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + 2 * self.width + (self.vocabulary + self.length) * self.width

    @property
    def flops_per_token(self) -> int:
        """Operations of forward and backward, without what checkpointing repeats.

        Two for each parameter of a matrix in the forward pass, the output's among them, and twice that in the backward
        pass; and for each token the scores and the sums of all tokens, as in "Efficient Large-Scale Language Model
        Training on GPU Clusters", Narayanan et al., 2021.
        """
        matrices = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        return 6 * matrices + 12 * self.layers * self.width * self.length


FULL = Shape()
TOY = Shape(width=32, layers=2, vocabulary=512, length=32, batch=2)


def build(shape: Shape) -> Any:
    """The same model on every rank, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": max(shape.width // 64, 2)}
    sizes |= {"vocab_size": shape.vocabulary, "n_positions": shape.length}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def batches(shape: Shape, device: torch.device, are_shared: bool = False) -> Iterator[torch.Tensor]:
    """Pairs of bytes of the standard library as tokens, (batch, length), without an end.

    Each rank has others, unless all of them compute one model together.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    source = b"".join(file.read_bytes() for file in files)
    pairs = torch.frombuffer(bytearray(source[: len(source) // 2 * 2]), dtype=torch.uint8).view(-1, 2).long()
    stream = (256 * pairs[:, 0] + pairs[:, 1]) % shape.vocabulary
    own = shape.batch * shape.length
    rank, size = (0, 1) if are_shared else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    parts = stream[: len(stream) // (own * size) * own * size].view(-1, size, shape.batch, shape.length)[:, rank]
    while True:
        yield from parts.to(device)
