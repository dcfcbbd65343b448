"""Frozen weights in 8 or 4 bits, and products of matrices in 8 bits, by their older names."""

from colossal._src.legacy.quantization import (
    BnbQuantizationConfig,
    all_reduce_fp8,
    cast_from_fp8,
    cast_to_fp8,
    linear_fp8,
    quantize_model,
)

__all__ = ["BnbQuantizationConfig", "all_reduce_fp8", "cast_from_fp8", "cast_to_fp8", "linear_fp8", "quantize_model"]
