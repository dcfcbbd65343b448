"""The older API of mixed precision: modes by `AMP_TYPE`, and functions that convert a model and its optimizer."""

from colossal._src.legacy.amp.conversion import (
    AMP_TYPE,
    AMPOptimizer,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
    mixed_precision_from,
    split_clipping,
)
from colossal._src.legacy.amp.mixed_precision_optimizer import (
    BF16MixedPrecisionMixin,
    FP16MixedPrecisionMixin,
    MixedPrecisionMixin,
    MixedPrecisionOptimizer,
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
    "split_clipping",
]
