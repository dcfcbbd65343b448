"""Normalization in one kernel."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from colossal._src._dtypes import HALF_DTYPES
from colossal.errors import UnsupportedError


@final
class FusedRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, one kernel on CUDA instead of six, and one pass over the input.

    Sums are in float32 for inputs in half precision, as the models have it. Where the input and the weight have one
    dtype the product is rounded once, and not twice; where they differ the result has the dtype that the model gives.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
    """

    def __init__(self, weight: nn.Parameter, eps: float, follows_weight: bool = False) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self._follows_weight = weight, eps, follows_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        weight, shape = self.weight, self.weight.shape
        if x.dtype == weight.dtype:
            return functional.rms_norm(x, shape, weight, self.variance_epsilon)
        normal = functional.rms_norm(x if x.dtype == torch.float64 else x.float(), shape, None, self.variance_epsilon)
        if not self._follows_weight:
            normal = normal.to(x.dtype)
        elif weight.dtype in HALF_DTYPES:
            normal = normal.to(weight.dtype)
        return weight * normal


@final
class FusedOffsetRMSNorm(nn.Module):
    """`FusedRMSNorm` whose weight counts from 1, as Gemma has it; it is applied in float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)


@final
class FusedScaleNorm(nn.Module):
    """LayerNorm with a weight and no bias, as Cohere has it, by torch's kernel."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        weight = self.weight
        if x.dtype == weight.dtype:
            return functional.layer_norm(x, weight.shape, weight, None, self.variance_epsilon)
        wide = functional.layer_norm(x.float(), weight.shape, weight.float(), None, self.variance_epsilon)
        return wide.to(x.dtype)


def _rms(norm: Any) -> nn.Module:
    return FusedRMSNorm(norm.weight, norm.variance_epsilon)


def _t5(norm: Any) -> nn.Module:
    return FusedRMSNorm(norm.weight, norm.variance_epsilon, follows_weight=True)


def _gemma(norm: Any) -> nn.Module:
    return FusedOffsetRMSNorm(norm.weight, norm.eps)


def _cohere(norm: Any) -> nn.Module:
    return FusedScaleNorm(norm.weight, norm.variance_epsilon)


_FUSED: Mapping[str, Any] = {
    **dict.fromkeys(
        ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "OlmoeRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"), _rms
    ),
    **dict.fromkeys(("GlmRMSNorm", "DeepseekV3RMSNorm"), _rms),
    **dict.fromkeys(("T5LayerNorm", "MT5LayerNorm", "UMT5LayerNorm"), _t5),
    **dict.fromkeys(("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"), _gemma),
    "CohereLayerNorm": _cohere,
}
"""What takes the place of the norms of the families, by the names of their classes."""

_BY_TORCH = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 (of all kinds)
_CALLS_TORCH = ("OlmoLayerNorm",)


def check_fused_norms(model: nn.Module) -> str:
    """Find the norms of a model to replace."""
    if any(map(_fits, model.modules())):
        return "fused"
    if any(isinstance(each, _BY_TORCH) or type(each).__name__ in _CALLS_TORCH for each in model.modules()):
        return "torch's"
    unknown = {type(each).__name__ for each in model.modules() if "Norm" in type(each).__name__}
    raise UnsupportedError(
        f"enable_fused_normalization knows the norms of torch and {', '.join(_FUSED)}. Found {type(model).__name__} "
        f"with {', '.join(sorted(unknown)) or 'none'}. Leave the option out, or use torch.nn.RMSNorm in the model."
    )


def fused_norm_of(norm: nn.Module) -> nn.Module:
    """Return what computes a norm in one kernel, with its parameters: the norm itself if it does."""
    if _fits(norm):
        return _FUSED[type(norm).__name__](norm).train(norm.training)
    if isinstance(norm, _BY_TORCH) or type(norm).__name__ in _CALLS_TORCH:
        return norm
    raise UnsupportedError(
        f"The norms of torch and {', '.join(_FUSED)} are computed in one kernel. Found {type(norm).__name__}. Leave it "
        "as it is, or use torch.nn.RMSNorm in the model."
    )


def fuse_norms(model: nn.Module) -> None:
    """Replace the norms of a model that are more than one kernel; parameters stay, and keep their names."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if _fits(child):
                setattr(parent, name, _FUSED[type(child).__name__](child).train(child.training))


def _fits(module: nn.Module) -> bool:
    """A weight of two dimensions, one row for each head, is left to the model."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ in _FUSED and isinstance(weight, torch.Tensor) and weight.dim() == 1
