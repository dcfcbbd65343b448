"""Layer normalization and attention by the names of the older extensions: operators of torch."""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch.nn import functional

from colossal._src.legacy.notice import superseded
from colossal.errors import UnsupportedError


@final
class LayerNormExtension:
    """What `LayerNormLoader` loads."""

    @staticmethod
    def forward_affine(
        input: torch.Tensor,  # noqa: A002 (the documented name)
        normalized_shape: Sequence[int],
        weight: torch.Tensor,
        bias: torch.Tensor,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalize.

        Args:
            input: (..., normalized_shape).
            normalized_shape: The last dimensions.
            weight: Of that shape.
            bias: Of that shape.
            epsilon: Added to the variance.

        Returns:
            The output, the means, and the inverse standard deviations.
        """
        return torch.native_layer_norm(input, list(normalized_shape), weight, bias, epsilon)

    @staticmethod
    def backward_affine(
        grad_output: torch.Tensor,
        mean: torch.Tensor,
        invvar: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 (the documented name)
        normalized_shape: Sequence[int],
        weight: torch.Tensor,
        bias: torch.Tensor,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the gradients.

        Args:
            grad_output: The gradient of the output.
            mean: As `forward_affine` returned them.
            invvar: As `forward_affine` returned them.
            input: The input of `forward_affine`, as the next four.
            normalized_shape: The last dimensions.
            weight: Of that shape.
            bias: Of that shape.
            epsilon: Not needed: `invvar` has it.

        Returns:
            The gradients of the input, the weight and the bias.
        """
        del epsilon
        return torch.ops.aten.native_layer_norm_backward(
            grad_output, input, list(normalized_shape), mean, invvar, weight, bias, [True, True, True]
        )


@final
class LayerNormLoader:
    """Loads layer normalization, forward and backward."""

    def load(self) -> type[LayerNormExtension]:
        """Load it.

        Returns:
            An object with the functions `forward_affine` and `backward_affine`.
        """
        superseded("colossal.kernel.kernel_loader.LayerNormLoader", "torch.nn.LayerNorm")
        return LayerNormExtension


@final
class FlashAttentionLoader:
    """Loads attention."""

    def load(self) -> Callable[..., torch.Tensor]:
        """Load it.

        Returns:
            The function `flash_attention`.
        """
        superseded(
            "colossal.kernel.kernel_loader.FlashAttentionLoader", "torch.nn.functional.scaled_dot_product_attention"
        )
        return flash_attention


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    q_indices: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by the kernel of torch for the device.

    Args:
        q: Queries, (samples, heads, queries, features).
        k: Keys, (samples, heads, keys, features).
        v: Values, as many.
        dropout_p: The probability with which a score is dropped.
        scale: By what scores are multiplied; by default the root of 1 / features.
        attention_mask: What is added to scores.
        is_causal: Whether a query sees no later keys; a mask is not read then.
        cu_seqlens_q: Only None, as the next five: a mask says where padding is.
        cu_seqlens_kv: Only None.
        max_seqlen_q: Only None.
        max_seqlen_kv: Only None.
        q_indices: Only None.
        kv_indices: Only None.

    Returns:
        The output, (samples, heads, queries, features).

    Raises:
        UnsupportedError: Samples are packed, by one of the six.
    """
    packed = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, q_indices, kv_indices)
    if any(each is not None for each in packed):
        raise UnsupportedError(
            "Attention is computed of padded samples. Found indices or lengths of packed ones. Pass the "
            "attention_mask alone, such as that of ColoAttention.prepare_attn_kwargs."
        )
    mask = None if is_causal else attention_mask
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
