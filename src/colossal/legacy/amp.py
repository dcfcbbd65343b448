"""Mixed precision by the mode of a config file, and converters of a model and its optimizer."""

from colossal._src.legacy.amp import (
    AMP_TYPE,
    AMPOptimizer,
    BF16MixedPrecisionMixin,
    FP16MixedPrecisionMixin,
    MixedPrecisionMixin,
    MixedPrecisionOptimizer,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
    mixed_precision_from,
)

__all__ = [
    "AMP_TYPE",
    "AMPOptimizer",
    "BF16MixedPrecisionMixin",
    "FP16MixedPrecisionMixin",
    "MixedPrecisionMixin",
    "MixedPrecisionOptimizer",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
    "mixed_precision_from",
]
