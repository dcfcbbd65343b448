"""Which parts of a step run in half precision: by name or as an object."""

from colossal._src.booster.mixed_precision.base import MixedPrecision
from colossal._src.booster.mixed_precision.bf16 import BF16MixedPrecision
from colossal._src.booster.mixed_precision.factory import mixed_precision_factory
from colossal._src.booster.mixed_precision.fp8 import FP8MixedPrecision
from colossal._src.booster.mixed_precision.fp16_apex import FP16ApexMixedPrecision
from colossal._src.booster.mixed_precision.fp16_naive import FP16NaiveMixedPrecision
from colossal._src.booster.mixed_precision.fp16_torch import FP16TorchMixedPrecision
from colossal._src.booster.mixed_precision.fp32 import FP32MixedPrecision

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
