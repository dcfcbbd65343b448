"""Attention and feed-forward layers of transformers, for every mode of tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from colossal._src.cluster import ambient_mesh
from colossal._src.nn.layer import Dropout, Linear
from colossal._src.nn.layer.tp import tp_sharding_of
from colossal.errors import ConfigError

Activation = Callable[[torch.Tensor], torch.Tensor]
Initializers = dict[str, Any]
"""The keywords `weight_initializer` and `bias_initializer` of a layer; those that are missing are its defaults."""


class SelfAttention(nn.Module):
    """Attention of tokens to each other, whose heads are sharded as features are.

    Args:
        dim: Features of a token.
        num_heads: Heads; they divide the features, and a rank has as many as any other.
        attention_dropout: The probability that a probability of attention is dropped.
        dropout: The probability that an element of the output is dropped.
        bias: Whether the linear layers have biases.
        dtype: Of the parameters.
        is_causal: Whether a token attends only to itself and to earlier tokens.
        initializers: Of the linear layers.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention_dropout: float,
        dropout: float,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        is_causal: bool = False,
        initializers: Initializers | None = None,
    ) -> None:
        super().__init__()
        _check_heads(dim, num_heads)
        self.head_size, self.is_causal = dim // num_heads, is_causal
        # Query, key and value of a head are adjacent, so that a contiguous shard has all of a head, in every mode.
        self.query_key_value = Linear(dim, 3 * dim, bias, dtype, **(initializers or {}))
        self.attention_dropout = Dropout(attention_dropout, parallel_input=True)
        self.dense = Linear(dim, dim, bias, dtype, **(initializers or {}))
        self.dropout = Dropout(dropout)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend.

        Args:
            x: This rank's samples, (samples, tokens, local features).
            attention_mask: Added to the scores, (samples, heads or 1, tokens or 1, tokens).

        Returns:
            The same shape.
        """
        query, key, value = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_size)).permute(3, 0, 2, 1, 4)
        mask = self._join_masks(attention_mask, query)
        if self.training and self.attention_dropout.p:
            scores = query @ key.transpose(-1, -2) * self.head_size**-0.5
            probs = (scores if mask is None else scores + mask).softmax(-1)
            out = self.attention_dropout(probs) @ value
        else:
            out = functional.scaled_dot_product_attention(query, key, value, mask)
        return self.dropout(self.dense(out.transpose(1, 2).flatten(2)))

    def _join_masks(self, mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
        if not self.is_causal:
            return mask
        length = query.shape[-2]
        later = query.new_full((length, length), torch.finfo(query.dtype).min).triu(1)
        return later if mask is None else torch.max(later + mask, later.new_tensor(torch.finfo(query.dtype).min))


class FeedForward(nn.Module):
    """Two linear layers with an activation between them.

    Args:
        dim: Features of a token.
        mlp_ratio: Inner features, as a multiple of `dim`.
        activation: Applied to each element.
        dropout: The probability that an element of the output is dropped.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.
        initializers: Of the linear layers.
    """

    def __init__(
        self,
        dim: int,
        mlp_ratio: float,
        activation: Activation,
        dropout: float,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        *,
        initializers: Initializers | None = None,
    ) -> None:
        super().__init__()
        inner = int(dim * mlp_ratio)
        self.dense_1 = Linear(dim, inner, bias, dtype, **(initializers or {}))
        self.activation = activation
        self.dense_2 = Linear(inner, dim, bias, dtype, **(initializers or {}))
        self.dropout = Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both layers to each token.

        Args:
            x: This rank's samples, (samples, tokens, local features).

        Returns:
            The same shape.
        """
        return self.dropout(self.dense_2(self.activation(self.dense_1(x))))


def _check_heads(dim: int, num_heads: int) -> None:
    mesh = ambient_mesh()
    axes = () if mesh is None else tp_sharding_of(mesh).features or ("tp",)
    num_shards = 1
    for axis in axes:
        assert mesh is not None
        num_shards *= mesh.size(axis)
    if dim % num_heads or num_heads % num_shards:
        raise ConfigError(
            f"Heads divide the features, and the {num_shards} ranks that shard features divide the heads. Found "
            f"dim={dim} and num_heads={num_heads}. Change one of them, or the size of tensor parallelism."
        )
