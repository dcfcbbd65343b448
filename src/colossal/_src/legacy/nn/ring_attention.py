"""Attention over a sequence that is sharded over the sp axis: the mode ``sequence`` of a config."""

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, final

import torch
from torch import nn

from colossal._src import comm
from colossal._src.cluster import ParallelMesh, ambient_mesh
from colossal._src.legacy.notice import superseded
from colossal.errors import ConfigError, ShapeError

_SUCCESSOR = "colossal.nn.attention.ring_attention, which never has the scores of a full row"


class AttnMaskType(Enum):
    """What attention masks in addition to the mask that it is given: nothing, or all later tokens.

    Attributes:
        padding: Nothing.
        causal: All later tokens.

    Example:
        >>> from colossal.legacy.nn import AttnMaskType
        >>> AttnMaskType.causal.value
        2
    """

    padding = 1
    causal = 2


@final
class RingQK:
    """Attention scores of this rank's queries and the keys of all ranks.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn import RingQK
        >>> RingQK.apply(torch.ones(1, 2, 4), torch.ones(1, 2, 4), 1, 1, 2).tolist()
        [[[4.0, 4.0], [4.0, 4.0]]]
    """

    @staticmethod
    def apply(
        sub_q: torch.Tensor, sub_k: torch.Tensor, batch_size: int, num_attention_heads: int, sub_seq_length: int
    ) -> torch.Tensor:
        """Multiply queries by keys.

        Args:
            sub_q: This rank's queries, (batch x heads, local tokens, features of a head).
            sub_k: This rank's keys, of the same shape.
            batch_size: Sequences.
            num_attention_heads: Heads.
            sub_seq_length: Local tokens.

        Returns:
            The scores, (batch x heads, local tokens, tokens of all ranks), without a scale.

        Raises:
            ShapeError: The tensors have another shape than these numbers say.

        Communication: all_gather, sp, the bytes of all keys; backward reduce_scatter, the same.

        Example:
            >>> import torch
            >>> from colossal.legacy.nn import RingQK
            >>> RingQK.apply(torch.ones(2, 3, 4), torch.ones(2, 3, 4), 1, 2, 3).shape
            torch.Size([2, 3, 3])
        """
        superseded("colossal.nn.layer.RingQK", _SUCCESSOR)
        for each in (sub_q, sub_k):
            _check_shape(each, (batch_size * num_attention_heads, sub_seq_length, sub_q.shape[-1]))
        return torch.bmm(sub_q, _gather(sub_k).transpose(1, 2))


@final
class RingAV:
    """The output of attention, of this rank's probabilities and the values of all ranks.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn import RingAV
        >>> RingAV.apply(torch.full((1, 2, 2), 0.5), torch.ones(1, 2, 4), 1, 1, 4, 2).tolist()
        [[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]]
    """

    @staticmethod
    def apply(
        attention_score: torch.Tensor,
        sub_v: torch.Tensor,
        batch_size: int,
        num_attention_heads: int,
        attention_head_size: int,
        sub_seq_length: int,
    ) -> torch.Tensor:
        """Multiply probabilities by values.

        Args:
            attention_score: This rank's probabilities, (batch x heads, local tokens, tokens of all ranks).
            sub_v: This rank's values, (batch x heads, local tokens, features of a head).
            batch_size: Sequences.
            num_attention_heads: Heads.
            attention_head_size: Features of a head.
            sub_seq_length: Local tokens.

        Returns:
            The output, of the shape of the values.

        Raises:
            ShapeError: The tensors have another shape than these numbers say.

        Communication: all_gather, sp, the bytes of all values; backward reduce_scatter, the same.

        Example:
            >>> import torch
            >>> from colossal.legacy.nn import RingAV
            >>> RingAV.apply(torch.ones(2, 3, 3), torch.ones(2, 3, 4), 1, 2, 4, 3).shape
            torch.Size([2, 3, 4])
        """
        superseded("colossal.nn.layer.RingAV", _SUCCESSOR)
        _check_shape(sub_v, (batch_size * num_attention_heads, sub_seq_length, attention_head_size))
        values = _gather(sub_v)
        _check_shape(attention_score, (len(values), sub_seq_length, values.shape[1]))
        return torch.bmm(attention_score, values)


@final
class TransformerSelfAttentionRing(nn.Module):
    """Self-attention whose sequence is sharded over the sp axis; its parameters are replicated.

    Superseded by `colossal.nn.attention.ring_attention`, and for models of Hugging Face by the modes of
    `colossal.shardformer.ShardConfig`.

    Args:
        hidden_size: Features of a token.
        num_attention_heads: Heads; they divide the features.
        attention_dropout: The probability that a probability of attention is dropped.
        attention_mask_func: Takes scores and a mask, both (batch, heads, local tokens, tokens of all ranks) or what
            broadcasts to that, and returns masked scores.
        layer_number: Which layer of the model this is, from 1.
        apply_query_key_layer_scaling: Divide the scores by `layer_number`, and multiply them by it in the softmax,
            which is in 32 bits.
        convert_fp16_to_fp32_in_softmax: Compute the softmax in 32 bits.
        attn_mask_type: Whether later tokens are masked too.
        masked_softmax_fusion: Accepted: the kernels of torch are used.
        fp16: Whether the inputs have this dtype.
        bf16: Whether the inputs have this dtype.

    Attributes:
        query_key_value: Makes query, key and value of each head, one after the other.
        dense: The weight and bias that are applied to the output.
        head_size: Features of a head.

    Raises:
        ConfigError: The heads do not divide the features, both dtypes are given, or there is no such mask type.

    Communication: all_gather, sp, the bytes of all keys and values; backward reduce_scatter, the same.

    Source: Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective", 2021,
    https://arxiv.org/abs/2105.13120.

    Example:
        >>> import torch
        >>> from colossal.legacy.nn import TransformerSelfAttentionRing
        >>> layer = TransformerSelfAttentionRing(8, 2, 0.0, lambda scores, mask: scores.masked_fill(mask, -1e4), 1)
        >>> output, bias = layer(torch.ones(5, 3, 8), torch.zeros(3, 1, 5, 5, dtype=torch.bool))
        >>> output.shape, bias.shape
        (torch.Size([5, 3, 8]), torch.Size([8]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        attention_dropout: float,
        attention_mask_func: Callable[[torch.Tensor, Any], torch.Tensor],
        layer_number: int,
        apply_query_key_layer_scaling: bool = False,
        convert_fp16_to_fp32_in_softmax: bool = False,
        attn_mask_type: AttnMaskType | str = AttnMaskType.padding,
        masked_softmax_fusion: bool = True,
        fp16: bool = False,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        superseded("colossal.nn.layer.TransformerSelfAttentionRing", _SUCCESSOR)
        if hidden_size % num_attention_heads or (fp16 and bf16):
            raise ConfigError(
                "Heads divide the features, and inputs have one dtype. Found "
                f"hidden_size={hidden_size}, num_attention_heads={num_attention_heads}, fp16={fp16}, bf16={bf16}. "
                "Change one of them."
            )
        del masked_softmax_fusion
        self.attention_mask_func, self.layer_number = attention_mask_func, max(1, layer_number)
        self.num_attention_heads, self.head_size = num_attention_heads, hidden_size // num_attention_heads
        self.attn_mask_type = _mask_type(attn_mask_type)
        self._coefficient = self.layer_number if apply_query_key_layer_scaling else 1
        self._is_exact = convert_fp16_to_fp32_in_softmax or apply_query_key_layer_scaling
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Let this rank's tokens attend to those of all ranks.

        Args:
            hidden_states: This rank's tokens, (local tokens, batch, features).
            attention_mask: What `attention_mask_func` takes; None to mask nothing by it.

        Returns:
            The output without its bias, of the same shape; and the bias, (features,).
        """
        length, batch, _ = hidden_states.shape
        heads, size = self.num_attention_heads, self.head_size
        mixed = self.query_key_value(hidden_states).view(length, batch * heads, 3 * size).transpose(0, 1)
        query, key, value = mixed.chunk(3, -1)
        scores = RingQK.apply(query, key, batch, heads, length) / (math.sqrt(size) * self._coefficient)
        probs = self._softmax(scores.view(batch, heads, length, -1), attention_mask)
        probs = self.attention_dropout(probs).view(batch * heads, length, -1)
        context = RingAV.apply(probs, value, batch, heads, size, length)
        context = context.transpose(0, 1).reshape(length, batch, heads * size)
        return nn.functional.linear(context, self.dense.weight), self.dense.bias

    def _softmax(self, scores: torch.Tensor, mask: Any) -> torch.Tensor:
        exact = scores.float() if self._is_exact and scores.element_size() < torch.float32.itemsize else scores
        exact = exact * self._coefficient
        if mask is not None:
            exact = self.attention_mask_func(exact, mask)
        if self.attn_mask_type is AttnMaskType.causal:
            exact = exact.masked_fill(_later_tokens(scores), -torch.inf)
        return exact.softmax(-1).to(scores.dtype)


def _mask_type(given: AttnMaskType | str) -> AttnMaskType:
    name = given.name if isinstance(given, AttnMaskType) else given
    if name not in AttnMaskType.__members__:
        raise ConfigError(
            f"A mask type is one of {', '.join(AttnMaskType.__members__)}. Found {given!r}. Pass one of them."
        )
    return AttnMaskType[name]


def _later_tokens(scores: torch.Tensor) -> torch.Tensor:
    length, total = scores.shape[-2:]
    mesh = _sequence_mesh()
    first = 0 if mesh is None else mesh.rank("sp") * length
    return torch.ones(length, total, dtype=torch.bool, device=scores.device).triu(1 + first)


def _sequence_mesh() -> ParallelMesh | None:
    mesh = ambient_mesh()
    return None if mesh is None or mesh.size("sp") == 1 else mesh


def _gather(sub: torch.Tensor) -> torch.Tensor:
    mesh = _sequence_mesh()
    return sub if mesh is None else comm.gather(sub, "sp", 1, mesh, partial_grad=True)


def _check_shape(tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            f"A rank has tensors of the shape {shape} here. Found {tuple(tensor.shape)}. Split sequences evenly, and "
            "put the heads of all sequences first."
        )
