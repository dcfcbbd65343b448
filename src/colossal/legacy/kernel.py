"""The kernel of Adam, and calls of several operations, by their older names."""

from colossal._src.legacy.kernel import (
    CPUAdamLoader,
    FusedOptimizerLoader,
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
    "set_jit_fusion_options",
]
