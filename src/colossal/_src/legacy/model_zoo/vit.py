"""Vision transformers from the layers of `colossal.nn`, for every mode of tensor parallelism."""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from colossal._src.legacy import superseded
from colossal._src.legacy.initializers import lecun_normal_, normal_, trunc_normal_, xavier_uniform_, zeros_
from colossal._src.legacy.model_zoo.transformer import Activation, FeedForward, Initializers, SelfAttention
from colossal._src.legacy.nn import partition_batch
from colossal._src.legacy.utils import checkpoint as recompute
from colossal._src.nn.layer import Classifier, Dropout, DropPath, LayerNorm, Linear, PatchEmbedding
from colossal.errors import ConfigError

InitMethod = Literal["torch", "jax"]

_SUCCESSOR = "transformers.ViTForImageClassification with HybridParallelPlugin(tp_size=..., pp_size=...)"
_INITIALIZERS: dict[str, dict[str, Initializers]] = {
    "torch": {"embed": {}, "transformer": {}, "head": {}},  # the defaults of the layers
    "jax": {
        "embed": {
            "weight_initializer": lecun_normal_(),
            "bias_initializer": zeros_(),
            "position_embed_initializer": trunc_normal_(std=0.02),
        },
        "transformer": {"weight_initializer": xavier_uniform_(), "bias_initializer": normal_(std=1e-6)},
        "head": {"weight_initializer": zeros_(), "bias_initializer": zeros_()},
    },
}


class ViTEmbedding(nn.Module):
    """Patches of images as tokens, with a class token and positions.

    Args:
        img_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch; it divides the former.
        in_chans: Channels of the images.
        embedding_dim: Features of a token.
        dropout: The probability that an element is dropped.
        dtype: Of the parameters.
        flatten: Make a sequence of tokens; otherwise a map of patches.
        init_method: How parameters are initialized: as ``"torch"`` does, or as the paper's code in ``"jax"``.

    Attributes:
        patch_embed: The layer that makes tokens of patches.

    Raises:
        ConfigError: The patches do not divide the image, or there is no such method.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.vit import ViTEmbedding
        >>> ViTEmbedding(8, 4, 3, 16, 0.0)(torch.ones(2, 3, 8, 8)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embedding_dim: int,
        dropout: float,
        dtype: torch.dtype | None = None,
        flatten: bool = True,
        init_method: InitMethod = "torch",
    ) -> None:
        super().__init__()
        superseded("model_zoo.vit", _SUCCESSOR)
        draw = _initializers(init_method, "embed")
        self.patch_embed = PatchEmbedding(img_size, patch_size, in_chans, embedding_dim, flatten, dtype, **draw)
        self.dropout = Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Make tokens of this rank's samples of a batch.

        Args:
            x: The images of the full batch, (samples, channels, height, width).

        Returns:
            (local samples, tokens, local features).

        Raises:
            ShapeError: The images have another size.
        """
        return self.dropout(self.patch_embed(partition_batch(x)))


class ViTSelfAttention(SelfAttention):
    """Attention of all tokens to each other.

    Args:
        dim: Features of a token.
        num_heads: Heads; they divide the features, and the ranks that shard features divide them.
        attention_dropout: The probability that a probability of attention is dropped.
        dropout: The probability that an element of the output is dropped.
        bias: Whether the linear layers have biases.
        dtype: Of the parameters.
        init_method: See `ViTEmbedding`.

    Raises:
        ConfigError: The heads do not divide, or there is no such method.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.vit import ViTSelfAttention
        >>> ViTSelfAttention(8, 2, 0.0, 0.0)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention_dropout: float,
        dropout: float,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        init_method: InitMethod = "torch",
    ) -> None:
        draw = _initializers(init_method, "transformer")
        super().__init__(dim, num_heads, attention_dropout, dropout, bias, dtype, initializers=draw)


class ViTMLP(FeedForward):
    """Two linear layers with an activation between them.

    Args:
        dim: Features of a token.
        mlp_ratio: Inner features, as a multiple of `dim`.
        activation: Applied to each element.
        dropout: The probability that an element of the output is dropped.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.
        init_method: See `ViTEmbedding`.

    Raises:
        ConfigError: There is no such method.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.vit import ViTMLP
        >>> ViTMLP(8, 4, torch.relu, 0.0)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        dim: int,
        mlp_ratio: float,
        activation: Activation,
        dropout: float,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        init_method: InitMethod = "torch",
    ) -> None:
        draw = _initializers(init_method, "transformer")
        super().__init__(dim, mlp_ratio, activation, dropout, dtype, bias, initializers=draw)


class ViTBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and around a residual connection.

    Args:
        dim: Features of a token.
        num_heads: Heads.
        mlp_ratio: Inner features of the feed-forward layer, as a multiple of `dim`.
        activation: That of the feed-forward layer.
        attention_dropout: The probability that a probability of attention is dropped.
        dropout: The probability that an element of an output is dropped.
        drop_path: The probability that a sample skips a layer.
        layernorm_epsilon: Added to the variance in norms.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.
        checkpoint: Compute activations again in the backward pass.
        init_method: See `ViTEmbedding`.

    Attributes:
        norm1: The norm before attention.
        attn: The `ViTSelfAttention`.
        norm2: The norm before the feed-forward layer.
        mlp: The `ViTMLP`.

    Raises:
        ConfigError: The heads do not divide, or there is no such method.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.vit import ViTBlock
        >>> ViTBlock(8, 2, 4, torch.relu)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        activation: Activation,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: bool = False,
        init_method: InitMethod = "torch",
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.norm1 = LayerNorm(dim, layernorm_epsilon, dtype)
        self.attn = ViTSelfAttention(dim, num_heads, attention_dropout, dropout, bias, dtype, init_method)
        self.drop_path = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, layernorm_epsilon, dtype)
        self.mlp = ViTMLP(dim, mlp_ratio, activation, dropout, dtype, bias, init_method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to this rank's samples.

        Args:
            x: (local samples, tokens, local features).

        Returns:
            The same shape.
        """
        return recompute(self._forward, False, x, use_reentrant=False) if self.checkpoint else self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViTHead(nn.Module):
    """Classes of images, from the class token.

    Args:
        dim: Features of a token.
        num_classes: Number of classes.
        representation_size: Features of a linear layer in between; None for no such layer.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.
        init_method: See `ViTEmbedding`.

    Attributes:
        representation: The linear layer in between; None without one.
        dense: The layer into the classes.

    Raises:
        ConfigError: There is no such method.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.vit import ViTHead
        >>> ViTHead(8, 10)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        representation_size: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        init_method: InitMethod = "torch",
    ) -> None:
        super().__init__()
        draw = _initializers(init_method, "head")
        inner = representation_size or dim
        self.representation = Linear(dim, inner, bias, dtype, **draw) if representation_size else None
        self.dense = Classifier(inner, num_classes, None, bias, dtype, **draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of this rank's samples.

        Args:
            x: (local samples, tokens, local features).

        Returns:
            (local samples, classes).
        """
        x = x[:, 0]
        return self.dense(x if self.representation is None else self.representation(x))


class VisionTransformer(nn.Module):
    """A vision transformer that classifies images.

    Args:
        img_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch; it divides the former.
        in_chans: Channels of the images.
        num_classes: Number of classes.
        depth: Number of blocks.
        num_heads: Heads.
        dim: Features of a token.
        mlp_ratio: Inner features of feed-forward layers, as a multiple of `dim`.
        attention_dropout: The probability that a probability of attention is dropped.
        dropout: The probability that an element of an output is dropped.
        drop_path: The probability that a sample skips a layer of the last block; that of earlier blocks grows from 0.
        layernorm_epsilon: Added to the variance in norms.
        activation: That of feed-forward layers.
        representation_size: See `ViTHead`.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.
        checkpoint: Compute activations of blocks again in the backward pass.
        init_method: See `ViTEmbedding`.

    Attributes:
        embed: The `ViTEmbedding`.
        blocks: The `ViTBlock` modules.
        norm: The last norm.
        head: The `ViTHead`.

    Raises:
        ConfigError: The heads or the patches do not divide, or there is no such method.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.vit import VisionTransformer
        >>> model = VisionTransformer(img_size=8, patch_size=4, num_classes=10, depth=1, num_heads=2, dim=8)
        >>> model(torch.ones(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        num_heads: int = 12,
        dim: int = 768,
        mlp_ratio: float = 4,
        attention_dropout: float = 0.0,
        dropout: float = 0.1,
        drop_path: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        activation: Activation = functional.gelu,
        representation_size: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: bool = False,
        init_method: InitMethod = "torch",
    ) -> None:
        super().__init__()
        self.embed = ViTEmbedding(img_size, patch_size, in_chans, dim, dropout, dtype=dtype, init_method=init_method)
        rates = [drop_path * block / max(depth - 1, 1) for block in range(depth)]
        block: dict[str, Any] = {
            "attention_dropout": attention_dropout,
            "dropout": dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "dtype": dtype,
            "bias": bias,
            "checkpoint": checkpoint,
            "init_method": init_method,
        }
        self.blocks = nn.ModuleList(
            [ViTBlock(dim, num_heads, mlp_ratio, activation, drop_path=rate, **block) for rate in rates]
        )
        self.norm = LayerNorm(dim, layernorm_epsilon, dtype)
        self.head = ViTHead(dim, num_classes, representation_size, dtype, bias, init_method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of this rank's samples of a batch.

        Args:
            x: The images of the full batch, (samples, channels, height, width).

        Returns:
            (local samples, classes).
        """
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initializers(method: str, part: str) -> Initializers:
    if method not in _INITIALIZERS:
        raise ConfigError(
            f"Parameters are initialized as by one of {', '.join(_INITIALIZERS)}. Found init_method={method!r}. Pass "
            "one of them."
        )
    return _INITIALIZERS[method][part]
