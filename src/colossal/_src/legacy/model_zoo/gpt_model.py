"""The full GPT model, and the sizes that have names."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from colossal._src.legacy.model_zoo.gpt import GPTBlock, GPTEmbedding, GPTLMHead
from colossal._src.legacy.model_zoo.transformer import Activation
from colossal._src.legacy.nn import partition_batch
from colossal._src.nn.layer import LayerNorm

_MASKED = -10000.0


class GPT(nn.Module):
    """GPT with a language model head that is tied to the embeddings.

    Args:
        vocab_size: Vocabulary entries.
        max_position_embeddings: The longest sequence.
        dim: Features of a token.
        num_heads: Heads.
        depth: Number of blocks.
        mlp_ratio: Inner features of feed-forward layers, as a multiple of `dim`.
        dropout: The probability that an element of an output is dropped.
        embedding_dropout: The probability that an element of an embedding is dropped.
        attention_dropout: The probability that a probability of attention is dropped.
        layernorm_epsilon: Added to the variance in norms.
        activation: That of feed-forward layers.
        padding_idx: A vocabulary entry whose embedding stays zero.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.
        apply_post_layernorm: Let the residual connections start after the norms.
        fuse_scale_mask_softmax: Accepted: torch chooses the kernel.
        checkpoint: Compute activations of blocks again in the backward pass.
        activation_offload: Keep the inputs of blocks in host memory meanwhile.

    Attributes:
        embed: The `GPTEmbedding`.
        blocks: The `GPTBlock` modules.
        norm: The last norm.
        head: The `GPTLMHead`.

    Raises:
        ConfigError: The heads do not divide.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.gpt import GPT
        >>> model = GPT(vocab_size=16, max_position_embeddings=4, dim=8, num_heads=2, depth=1)
        >>> model(torch.ones(2, 3, dtype=torch.int64)).shape
        torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        vocab_size: int = 50304,
        max_position_embeddings: int = 1024,
        dim: int = 768,
        num_heads: int = 12,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        dropout: float = 0.1,
        embedding_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        activation: Activation = functional.gelu,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        apply_post_layernorm: bool = False,
        fuse_scale_mask_softmax: bool = False,
        checkpoint: bool = False,
        activation_offload: bool = False,
    ) -> None:
        super().__init__()
        self.embed = GPTEmbedding(
            dim, vocab_size, max_position_embeddings, padding_idx=padding_idx, dropout=embedding_dropout, dtype=dtype
        )
        block: dict[str, Any] = {
            "attention_dropout": attention_dropout,
            "dropout": dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "dtype": dtype,
            "bias": bias,
            "apply_post_layernorm": apply_post_layernorm,
            "fuse_scale_mask_softmax": fuse_scale_mask_softmax,
            "checkpoint": checkpoint,
            "activation_offload": activation_offload,
        }
        self.blocks = nn.ModuleList([GPTBlock(dim, num_heads, mlp_ratio, activation, **block) for _ in range(depth)])
        self.norm = LayerNorm(dim, layernorm_epsilon, dtype)
        self.head = GPTLMHead(dim, vocab_size, self.embed.word_embedding_weight, dtype=dtype)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits.

        Args:
            input_ids: Those of the full batch, (samples, tokens).
            attention_mask: 1 for a token, 0 for padding, of the same shape.

        Returns:
            This rank's logits, (local samples, tokens, local vocabulary entries).
        """
        x = self.embed(input_ids)
        mask = None
        if attention_mask is not None:
            mask = (1.0 - partition_batch(attention_mask)[:, None, None].to(x.dtype)) * _MASKED
        for block in self.blocks:
            x, mask = block(x, mask)
        return self.head(self.norm(x))


def gpt2_small(**kwargs: Any) -> GPT:
    """Build GPT-2 with 12 blocks of 768 features.

    Args:
        **kwargs: Further arguments of `GPT`, which win.

    Returns:
        The model.

    Communication: as `GPT`.

    Example:
        >>> from colossal.legacy.model_zoo.gpt import gpt2_small
        >>> model = gpt2_small(dim=32, depth=1, num_heads=2, vocab_size=8)
        >>> len(model.blocks)
        1
    """
    return GPT(**{"dim": 768, "depth": 12, "num_heads": 12, **kwargs})


def gpt2_medium(**kwargs: Any) -> GPT:
    """Build GPT-2 with 24 blocks of 1024 features.

    Args:
        **kwargs: Further arguments of `GPT`, which win.

    Returns:
        The model.

    Communication: as `GPT`.

    Example:
        >>> from colossal.legacy.model_zoo.gpt import gpt2_medium
        >>> model = gpt2_medium(dim=32, depth=1, num_heads=2, vocab_size=8)
        >>> len(model.blocks)
        1
    """
    return GPT(**{"dim": 1024, "depth": 24, "num_heads": 16, **kwargs})


def gpt2_large(**kwargs: Any) -> GPT:
    """Build GPT-2 with 36 blocks of 1536 features.

    Args:
        **kwargs: Further arguments of `GPT`, which win.

    Returns:
        The model.

    Communication: as `GPT`.

    Example:
        >>> from colossal.legacy.model_zoo.gpt import gpt2_large
        >>> model = gpt2_large(dim=32, depth=1, num_heads=2, vocab_size=8)
        >>> len(model.blocks)
        1
    """
    return GPT(**{"dim": 1536, "depth": 36, "num_heads": 16, **kwargs})


def gpt2_xl(**kwargs: Any) -> GPT:
    """Build GPT-2 with 48 blocks of 1600 features.

    Args:
        **kwargs: Further arguments of `GPT`, which win.

    Returns:
        The model.

    Communication: as `GPT`.

    Example:
        >>> from colossal.legacy.model_zoo.gpt import gpt2_xl
        >>> model = gpt2_xl(dim=32, depth=1, num_heads=2, vocab_size=8)
        >>> len(model.blocks)
        1
    """
    return GPT(**{"dim": 1600, "depth": 48, "num_heads": 32, **kwargs})


def gpt2_8b(**kwargs: Any) -> GPT:
    """Build GPT-2 with 72 blocks of 3072 features, 8 billion parameters.

    Args:
        **kwargs: Further arguments of `GPT`, which win.

    Returns:
        The model.

    Communication: as `GPT`.

    Example:
        >>> from colossal.legacy.model_zoo.gpt import gpt2_8b
        >>> model = gpt2_8b(dim=32, depth=1, num_heads=2, vocab_size=8)
        >>> len(model.blocks)
        1
    """
    return GPT(**{"dim": 3072, "depth": 72, "num_heads": 24, **kwargs})


def gpt3(**kwargs: Any) -> GPT:
    """Build GPT-3 with 96 blocks of 12288 features, 175 billion parameters.

    Args:
        **kwargs: Further arguments of `GPT`, which win.

    Returns:
        The model.

    Communication: as `GPT`.

    Example:
        >>> from colossal.legacy.model_zoo.gpt import gpt3
        >>> model = gpt3(dim=32, depth=1, num_heads=2, vocab_size=8)
        >>> len(model.blocks)
        1
    """
    return GPT(**{"dim": 12288, "depth": 96, "num_heads": 96, "max_position_embeddings": 2048, **kwargs})
