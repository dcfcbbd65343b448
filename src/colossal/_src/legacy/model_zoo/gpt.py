"""The parts of GPT from the layers of `colossal.nn`, for every mode of tensor parallelism."""

import torch
from torch import nn

from colossal._src.legacy import superseded
from colossal._src.legacy.initializers import normal_
from colossal._src.legacy.model_zoo.transformer import Activation, FeedForward, Initializers, SelfAttention
from colossal._src.legacy.nn import partition_batch
from colossal._src.legacy.utils import checkpoint as recompute
from colossal._src.nn.layer import Dropout, Embedding, LayerNorm, VocabParallelClassifier, VocabParallelEmbedding
from colossal._src.nn.loss import VocabParallelCrossEntropyLoss

_STD = 0.02
_SUCCESSOR = "transformers.GPT2LMHeadModel with HybridParallelPlugin(tp_size=..., pp_size=...)"


class GPTEmbedding(nn.Module):
    """Embeddings of tokens and of their positions.

    Args:
        embedding_dim: Features of a token.
        vocab_size: Vocabulary entries.
        max_position_embeddings: The longest sequence.
        num_tokentypes: Types of tokens, which have embeddings too; 0 for none.
        padding_idx: A vocabulary entry whose embedding stays zero.
        dropout: The probability that an element is dropped.
        dtype: Of the parameters.

    Attributes:
        word_embeddings: The embeddings of tokens, whose rows are sharded.
        position_embeddings: Those of positions.
        tokentype_embeddings: Those of types; None without types.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.gpt import GPTEmbedding
        >>> GPTEmbedding(8, vocab_size=16, max_position_embeddings=4)(torch.ones(2, 3, dtype=torch.int64)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        embedding_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        num_tokentypes: int = 0,
        padding_idx: int | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        superseded("model_zoo.gpt", _SUCCESSOR)
        draw: Initializers = {"weight_initializer": normal_(std=_STD)}
        self.word_embeddings = VocabParallelEmbedding(vocab_size, embedding_dim, padding_idx, dtype, **draw)
        self.position_embeddings = Embedding(max_position_embeddings, embedding_dim, dtype=dtype, **draw)
        self.tokentype_embeddings = (
            Embedding(num_tokentypes, embedding_dim, dtype=dtype, **draw) if num_tokentypes else None
        )
        self.dropout = Dropout(dropout)

    @property
    def word_embedding_weight(self) -> nn.Parameter:
        """This rank's rows of the embeddings of tokens."""
        return self.word_embeddings.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        tokentype_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embed this rank's samples of a batch.

        Args:
            input_ids: Those of the full batch, (samples, tokens).
            position_ids: Their positions; by default from 0.
            tokentype_ids: Their types.

        Returns:
            (local samples, tokens, local features).
        """
        tokens = partition_batch(input_ids)
        if position_ids is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        else:
            positions = partition_batch(position_ids)
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        if self.tokentype_embeddings is not None and tokentype_ids is not None:
            x = x + self.tokentype_embeddings(partition_batch(tokentype_ids))
        return self.dropout(x)


class GPTSelfAttention(SelfAttention):
    """Causal attention.

    Args:
        dim: Features of a token.
        num_heads: Heads; they divide the features, and the ranks that shard features divide them.
        attention_dropout: The probability that a probability of attention is dropped.
        dropout: The probability that an element of the output is dropped.
        bias: Whether the linear layers have biases.
        fuse_scale_mask_softmax: Accepted: torch chooses the kernel.
        dtype: Of the parameters.

    Raises:
        ConfigError: The heads do not divide.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.gpt import GPTSelfAttention
        >>> GPTSelfAttention(8, 2, 0.0, 0.0)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention_dropout: float,
        dropout: float,
        bias: bool = True,
        fuse_scale_mask_softmax: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        del fuse_scale_mask_softmax
        draw: Initializers = {"weight_initializer": normal_(std=_STD)}
        super().__init__(dim, num_heads, attention_dropout, dropout, bias, dtype, is_causal=True, initializers=draw)


class GPTMLP(FeedForward):
    """Two linear layers with an activation between them.

    Args:
        dim: Features of a token.
        mlp_ratio: Inner features, as a multiple of `dim`.
        activation: Applied to each element.
        dropout: The probability that an element of the output is dropped.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.gpt import GPTMLP
        >>> GPTMLP(8, 4, torch.relu, 0.0)(torch.ones(2, 3, 8)).shape
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
    ) -> None:
        draw: Initializers = {"weight_initializer": normal_(std=_STD)}
        super().__init__(dim, mlp_ratio, activation, dropout, dtype, bias, initializers=draw)


class GPTBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and around a residual connection.

    Args:
        dim: Features of a token.
        num_heads: Heads.
        mlp_ratio: Inner features of the feed-forward layer, as a multiple of `dim`.
        activation: That of the feed-forward layer.
        attention_dropout: The probability that a probability of attention is dropped.
        dropout: The probability that an element of an output is dropped.
        layernorm_epsilon: Added to the variance in norms.
        dtype: Of the parameters.
        bias: Whether the linear layers have biases.
        apply_post_layernorm: Let the residual connections start after the norms.
        fuse_scale_mask_softmax: Accepted: torch chooses the kernel.
        checkpoint: Compute activations again in the backward pass.
        activation_offload: Keep the inputs of the block in host memory meanwhile.

    Attributes:
        norm1: The norm before attention.
        attn: The `GPTSelfAttention`.
        norm2: The norm before the feed-forward layer.
        mlp: The `GPTMLP`.

    Raises:
        ConfigError: The heads do not divide.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.gpt import GPTBlock
        >>> x, mask = GPTBlock(8, 2, 4, torch.relu)(torch.ones(2, 3, 8))
        >>> x.shape
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
        layernorm_epsilon: float = 1e-5,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        apply_post_layernorm: bool = False,
        fuse_scale_mask_softmax: bool = False,
        checkpoint: bool = False,
        activation_offload: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint, self.activation_offload = checkpoint, activation_offload
        self.apply_post_layernorm = apply_post_layernorm
        self.norm1 = LayerNorm(dim, layernorm_epsilon, dtype)
        self.attn = GPTSelfAttention(dim, num_heads, attention_dropout, dropout, bias, fuse_scale_mask_softmax, dtype)
        self.norm2 = LayerNorm(dim, layernorm_epsilon, dtype)
        self.mlp = GPTMLP(dim, mlp_ratio, activation, dropout, dtype, bias)

    def forward(
        self, x: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the block to this rank's samples.

        Args:
            x: (local samples, tokens, local features).
            attention_mask: Added to the scores, (local samples, 1, 1, tokens).

        Returns:
            What the next block takes: the result, of the same shape, and the mask.
        """
        if self.checkpoint:
            offload = self.activation_offload
            return recompute(self._forward, offload, x, attention_mask, use_reentrant=offload), attention_mask
        return self._forward(x, attention_mask), attention_mask

    def _forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        normed = self.norm1(x)
        x = (normed if self.apply_post_layernorm else x) + self.attn(normed, attention_mask)
        normed = self.norm2(x)
        return (normed if self.apply_post_layernorm else x) + self.mlp(normed)


class GPTLMHead(nn.Module):
    """Logits, sharded over the vocabulary as `GPTLMLoss` takes them.

    Args:
        dim: Features of a token.
        vocab_size: Vocabulary entries.
        word_embedding_weight: The weight of `GPTEmbedding`, to be tied; one of its own by default.
        bias: Whether there is a bias.
        dtype: Of the parameters.

    Attributes:
        dense: The linear layer.

    Raises:
        ShapeError: The tied weight does not have the shape of this rank's shard.

    Communication: that of its layers in the mode of the mesh in force.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.gpt import GPTLMHead
        >>> GPTLMHead(8, 16)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        word_embedding_weight: nn.Parameter | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dense = VocabParallelClassifier(
            dim, vocab_size, word_embedding_weight, bias, dtype, weight_initializer=normal_(std=_STD)
        )

    @property
    def weight(self) -> nn.Parameter:
        """This rank's shard of the weight."""
        return self.dense.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of this rank's samples.

        Args:
            x: (local samples, tokens, local features).

        Returns:
            (local samples, tokens, local vocabulary entries).
        """
        return self.dense(x)


class GPTLMLoss(nn.Module):
    """The mean cross-entropy of each token, given those before it, over the samples of all ranks of a replica.

    Attributes:
        loss: The cross-entropy.

    Example:
        >>> import torch
        >>> from colossal.legacy.model_zoo.gpt import GPTLMLoss
        >>> GPTLMLoss()(torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.int64)).exp().round().item()
        4.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = VocabParallelCrossEntropyLoss()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss.

        Args:
            logits: Those of `GPTLMHead`.
            labels: The tokens themselves, (samples, tokens), of the full batch or of this rank.

        Returns:
            The loss, a scalar, on all ranks.

        Raises:
            ShapeError: The labels do not fit the logits.
            IndexError: A label is no vocabulary entry.
        """
        return self.loss(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())
