"""Layer normalization and the softmax of attention scores, by the names of older fused kernels."""

from collections.abc import Callable
from typing import final

import torch
from torch import nn
from torch.nn import functional

from colossal._src.legacy.nn.ring_attention import AttnMaskType
from colossal._src.legacy.notice import superseded
from colossal.errors import ConfigError, ShapeError

_MaskFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_MASKED_SCORE = -10000.0


@final
class MixedFusedLayerNorm(nn.LayerNorm):
    """Layer normalization whose input may have another dtype than its parameters.

    It is computed in the wider of the two dtypes, and the result has that of the parameters.

    Args:
        normalized_shape: The last dimensions of the input.
        eps: Added to the variance.
        device: Where the parameters are.
        dtype: Their dtype.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, device=device, dtype=dtype)
        superseded("colossal.nn.layer.MixedFusedLayerNorm", "torch.nn.LayerNorm")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name of torch)
        """Normalize.

        Args:
            input: (..., normalized_shape).

        Returns:
            The same shape, in the dtype of the parameters.
        """
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        made = functional.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)
        return made.to(self.weight.dtype)


@final
class FusedScaleMaskSoftmax(nn.Module):
    """Scales attention scores, masks them, and computes their softmax over the keys.

    Args:
        input_in_fp16: Return float16.
        input_in_bf16: Return bfloat16.
        attn_mask_type: With ``causal``, later keys are masked too.
        scaled_masked_softmax_fusion: Accepted as documented: the result is the same with and without.
        mask_func: What masks scores where a mask is true; by default they become -10000.
        softmax_in_fp32: Compute in float32.
        scale: What scores are multiplied by.

    Raises:
        ConfigError: Both dtypes are chosen, or a scale without `softmax_in_fp32`.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: _MaskFunction | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        superseded(
            "colossal.nn.layer.scaled_softmax.FusedScaleMaskSoftmax", "torch.nn.functional.scaled_dot_product_attention"
        )
        del scaled_masked_softmax_fusion
        if input_in_fp16 and input_in_bf16:
            raise ConfigError("Scores have one dtype. Found input_in_fp16 and input_in_bf16. Pass one of them.")
        if scale is not None and not softmax_in_fp32:
            raise ConfigError(
                f"Scaled scores are computed in float32. Found scale={scale} and softmax_in_fp32=False. Pass "
                "softmax_in_fp32=True."
            )
        self._dtype = torch.float16 if input_in_fp16 else torch.bfloat16 if input_in_bf16 else None
        self._is_causal = attn_mask_type is AttnMaskType.causal
        self._mask_func = mask_func or _fill_masked
        self._is_wide, self._scale = softmax_in_fp32, scale

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:  # noqa: A002 (the documented name)
        """Compute the softmax.

        Args:
            input: The scores, (batch, heads, queries, keys).
            mask: True where a key is not seen, of a shape that broadcasts to that of `input`.

        Returns:
            Probabilities, (batch, heads, queries, keys).

        Raises:
            ShapeError: A causal mask is asked for, and there are not as many queries as keys.
        """
        queries, keys = input.shape[-2:]
        if self._is_causal and queries != keys:
            raise ShapeError(
                f"Under a causal mask there are as many queries as keys. Found {queries} and {keys}. Use "
                "AttnMaskType.padding with a mask."
            )
        narrow = self._dtype or input.dtype
        scores = input.float() if self._is_wide and input.dtype in (torch.float16, torch.bfloat16) else input
        if self._scale is not None:
            scores = scores * self._scale
        if self._is_causal:
            later = torch.ones(queries, keys, dtype=torch.bool, device=input.device).triu(1)
            mask = later if mask is None else mask.bool() | later
        if mask is not None:
            scores = self._mask_func(scores, mask)
        return scores.softmax(-1).to(narrow)


def _fill_masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(mask.bool(), _MASKED_SCORE)
