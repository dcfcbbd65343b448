"""Vision transformers whose feed-forward layers are experts."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from colossal._src.legacy.model_zoo.vit import ViTEmbedding, ViTHead, ViTMLP, ViTSelfAttention
from colossal._src.legacy.moe import MOE_CONTEXT, Experts, MoeLayer, NormalNoiseGenerator, Top2Router
from colossal._src.legacy.notice import superseded
from colossal._src.nn.layer import DropPath

_SUCCESSOR = "a model with colossal.nn.moe.MixtureOfExperts"


class VanillaFFN(nn.Module):
    """Two linear layers with GELU between them, and dropout after each.

    Args:
        d_model: The width of tokens.
        d_ff: The width between the layers.
        drop_rate: The probability of dropout.

    Attributes:
        dense1: The first layer.
        dense2: The second.
        dropout: Applied after each.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.moe import VanillaFFN
        >>> VanillaFFN(8, 16)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, d_model: int, d_ff: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers.

        Args:
            x: Of shape (..., D).

        Returns:
            The same shape.
        """
        x = self.dropout(nn.functional.gelu(self.dense1(x)))
        return self.dropout(self.dense2(x))


class _Block(nn.Module):
    """A transformer block, parts of which other blocks may share."""

    def __init__(self, d_model: int, attention: nn.Module, ffn: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model, eps=1e-6), nn.LayerNorm(d_model, eps=1e-6)
        self.attention, self.ffn, self.drop_path = attention, ffn, DropPath(drop_path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return x + self.drop_path(self.ffn(self.norm2(x)))


class _Classifier(nn.Module):
    """Blocks between an embedding of patches and a head."""

    def __init__(
        self, sizes: tuple[int, int, int], num_classes: int, d_model: int, drop_rate: float, blocks: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        superseded("model_zoo.moe", _SUCCESSOR)
        self.embed = ViTEmbedding(*sizes, d_model, drop_rate)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(d_model, eps=1e-6)
        self.head = ViTHead(d_model, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits; the auxiliary losses of this pass are in `MOE_CONTEXT`.

        Args:
            x: Images, of shape (samples, channels, height, width).

        Returns:
            Of shape (samples, classes).
        """
        MOE_CONTEXT.reset_loss()
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Widenet(_Classifier):
    """A vision transformer whose blocks share attention and experts, and have norms and gates of their own.

    Args:
        num_experts: The number of experts on all ranks.
        capacity_factor_train: The factor of the capacity in training.
        capacity_factor_eval: The factor in evaluation.
        capacity_factor: Another name of `capacity_factor_train`.
        drop_tks: Whether tokens are dropped in evaluation too.
        img_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch; it divides the former.
        in_chans: Channels of the images.
        num_classes: Number of classes.
        depth: Number of blocks.
        d_model: Features of a token.
        num_heads: Heads of attention.
        d_ff: The width inside of experts.
        attention_drop: The probability that a probability of attention is dropped.
        drop_rate: The probability that an element of an output is dropped.
        drop_path: The probability that a sample skips a layer.

    Communication: all_to_all, ep, as of `colossal.nn.moe.dispatch` and `colossal.nn.moe.combine`.

    Source: Xue et al., "Go Wider Instead of Deeper", 2021, https://arxiv.org/abs/2107.11817.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.moe import Widenet
        >>> sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "depth": 2}
        >>> model = Widenet(num_experts=4, capacity_factor=1.2, d_model=16, num_heads=2, d_ff=32, **sizes)
        >>> model(torch.ones(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        *,
        capacity_factor: float | None = None,
        drop_tks: bool = True,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_ff: int = 4096,
        attention_drop: float = 0.0,
        drop_rate: float = 0.1,
        drop_path: float = 0.0,
    ) -> None:
        factor = capacity_factor_train if capacity_factor is None else capacity_factor
        noise = NormalNoiseGenerator(num_experts)
        router = Top2Router(factor, capacity_factor_eval, noisy_func=noise, drop_tks=drop_tks)
        attention = ViTSelfAttention(d_model, num_heads, attention_drop, drop_rate)
        experts = Experts(VanillaFFN, num_experts, d_model=d_model, d_ff=d_ff, drop_rate=drop_rate)
        layers = [MoeLayer(d_model, num_experts, router, experts) for _ in range(depth)]
        blocks = [_Block(d_model, attention, layer, drop_path) for layer in layers]
        super().__init__((img_size, patch_size, in_chans), num_classes, d_model, drop_rate, blocks)


class ViTMoE(_Classifier):
    """A vision transformer with experts in every second block.

    Args:
        num_experts: The number of experts of each of these blocks, on all ranks.
        capacity_factor_train: The factor of the capacity in training.
        capacity_factor_eval: The factor in evaluation.
        drop_tks: Whether tokens are dropped in evaluation too.
        img_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch; it divides the former.
        in_chans: Channels of the images.
        num_classes: Number of classes.
        depth: Number of blocks.
        d_model: Features of a token.
        num_heads: Heads of attention.
        d_ff: The width inside of experts and of dense layers.
        attention_drop: The probability that a probability of attention is dropped.
        drop_rate: The probability that an element of an output is dropped.
        drop_path: The probability that a sample skips a layer of the last block; that of earlier blocks grows from 0.

    Communication: all_to_all, ep, as of `colossal.nn.moe.dispatch` and `colossal.nn.moe.combine`.

    Source: Riquelme et al., "Scaling Vision with Sparse Mixture of Experts", 2021, https://arxiv.org/abs/2106.05974.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.moe import ViTMoE
        >>> sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "depth": 2}
        >>> ViTMoE(num_experts=4, d_model=16, num_heads=2, d_ff=32, **sizes)(torch.ones(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        *,
        drop_tks: bool = True,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_ff: int = 3072,
        attention_drop: float = 0.0,
        drop_rate: float = 0.1,
        drop_path: float = 0.0,
    ) -> None:
        noise = NormalNoiseGenerator(num_experts)
        router = Top2Router(capacity_factor_train, capacity_factor_eval, noisy_func=noise, drop_tks=drop_tks)
        blocks: list[nn.Module] = []
        for number, rate in enumerate(torch.linspace(0, drop_path, depth, device="cpu").tolist()):
            ffn: Any = ViTMLP(d_model, d_ff / d_model, nn.functional.gelu, drop_rate)
            if number % 2:
                experts = Experts(VanillaFFN, num_experts, d_model=d_model, d_ff=d_ff, drop_rate=drop_rate)
                ffn = MoeLayer(d_model, num_experts, router, experts)
            attention = ViTSelfAttention(d_model, num_heads, attention_drop, drop_rate)
            blocks.append(_Block(d_model, attention, ffn, rate))
        super().__init__((img_size, patch_size, in_chans), num_classes, d_model, drop_rate, blocks)
