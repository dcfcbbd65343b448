"""Which parts of a step run in half precision: by name or as an object."""

from colossal._src.booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    FP32MixedPrecision,
    MixedPrecision,
    mixed_precision_factory,
)

__all__ = [
    "BF16MixedPrecision",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "FP32MixedPrecision",
    "MixedPrecision",
    "mixed_precision_factory",
]
