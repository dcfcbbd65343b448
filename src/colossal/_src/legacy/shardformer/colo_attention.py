"""Attention of all kinds of masks by one function, by its older name: `scaled_dot_product_attention` of torch."""

from enum import Enum
from typing import Any, final

import torch

from colossal._src.legacy.kernel import flash_attention
from colossal.errors import ConfigError, UnsupportedError


@final
class AttnMaskType(Enum):
    """What an attention mask is of."""

    CUSTOM = 0
    PADDED = 1
    CAUSAL = 2
    PADDED_CAUSAL = 3


@final
class ColoAttention:
    """Makes masks of attention, and computes it."""

    @staticmethod
    def prepare_attn_kwargs(
        shape_4d: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        q_padding_mask: torch.Tensor | None = None,
        kv_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        invert: bool = True,
    ) -> dict[str, Any]:
        """Make the keyword arguments of `attention`: a mask of the shape (samples, 1, queries, keys) and its type.

        Args:
            shape_4d: That shape.
            dtype: That of the mask, which is added to scores.
            device: Where it is made.
            q_padding_mask: Of the queries, (samples, queries): 1 for tokens and 0 for padding.
            kv_padding_mask: Of the keys, by default the same.
            is_causal: Whether a query sees no later keys.
            invert: Only True: the masks have ones for tokens.

        Raises:
            ConfigError: The shape is another, or is causal and not square.
            UnsupportedError: Not `invert`.
        """
        if not invert:
            raise UnsupportedError("Masks have ones for tokens. Found invert=False. Pass 1 - mask.")
        if len(shape_4d) != 4 or shape_4d[1] != 1 or (is_causal and shape_4d[2] != shape_4d[3]):  # noqa: PLR2004
            raise ConfigError(
                "A mask has the shape (samples, 1, queries, keys), and as many queries as keys if it is causal. Found "
                f"{tuple(shape_4d)}. Pass such a shape."
            )
        kept = torch.ones(shape_4d, dtype=torch.bool, device=device)
        if is_causal:
            kept = kept.tril()
        mask = q_padding_mask if kv_padding_mask is None else kv_padding_mask
        if mask is not None:
            kept = kept & mask[:, None, None, :].bool()
        kind = AttnMaskType.CUSTOM
        if mask is None:
            kind = AttnMaskType.CAUSAL if is_causal else AttnMaskType.CUSTOM
        elif q_padding_mask is None or kv_padding_mask is None:
            kind = AttnMaskType.PADDED_CAUSAL if is_causal else AttnMaskType.PADDED
        added = torch.zeros(shape_4d, dtype=dtype, device=device).masked_fill(~kept, torch.finfo(dtype).min)
        return {"attention_mask": added, "attention_mask_type": kind}

    @staticmethod
    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attention_mask_type: AttnMaskType = AttnMaskType.CUSTOM,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        q_indices: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            q: Queries, of the shape (samples, heads, queries, features).
            k: Keys, (samples, heads, keys, features).
            v: Values, as many.
            attention_mask: What is added to scores, as of `prepare_attn_kwargs`.
            attention_mask_type: With CAUSAL, no mask is read.
            cu_seqlens_q: Only None, as the next five: a mask says where padding is.
            cu_seqlens_kv: Only None.
            max_seqlen_q: Only None.
            max_seqlen_kv: Only None.
            q_indices: Only None.
            kv_indices: Only None.
            dropout_p: The probability with which a score is dropped.
            scale: By what scores are multiplied; by default the root of 1 / features.

        Raises:
            UnsupportedError: Samples are packed, by one of the six.
        """
        return flash_attention(
            q,
            k,
            v,
            dropout_p,
            scale,
            attention_mask,
            attention_mask_type is AttnMaskType.CAUSAL,
            cu_seqlens_q,
            cu_seqlens_kv,
            max_seqlen_q,
            max_seqlen_kv,
            q_indices,
            kv_indices,
        )
