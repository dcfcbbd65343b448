"""Quantization by its older names."""

from colossal._src.legacy.quantization.fp8 import linear_fp8
from colossal._src.legacy.quantization.weights import BnbQuantizationConfig, quantize_model

__all__ = ["BnbQuantizationConfig", "linear_fp8", "quantize_model"]
