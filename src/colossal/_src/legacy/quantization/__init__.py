"""Quantization by its older names."""

from colossal._src.legacy.quantization.fp8 import all_reduce_fp8, cast_from_fp8, cast_to_fp8, linear_fp8
from colossal._src.legacy.quantization.weights import BnbQuantizationConfig, quantize_model

__all__ = ["BnbQuantizationConfig", "all_reduce_fp8", "cast_from_fp8", "cast_to_fp8", "linear_fp8", "quantize_model"]
