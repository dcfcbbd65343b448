"""Frozen weights in 8 or 4 bits, and products of matrices in 8 bits, by their older names."""

from colossal._src.legacy.quantization import BnbQuantizationConfig, linear_fp8, quantize_model

__all__ = ["BnbQuantizationConfig", "linear_fp8", "quantize_model"]
