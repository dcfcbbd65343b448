"""Kernels by their older names."""

from colossal._src.legacy.kernel.adam_loaders import CPUAdamLoader, FusedOptimizerLoader
from colossal._src.legacy.kernel.fused_loaders import flash_attention
from colossal._src.legacy.kernel.fusions import (
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_train,
    bias_gelu_impl,
    set_jit_fusion_options,
)

__all__ = [
    "CPUAdamLoader",
    "FusedOptimizerLoader",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_gelu_impl",
    "flash_attention",
    "set_jit_fusion_options",
]
