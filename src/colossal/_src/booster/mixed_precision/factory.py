"""From the name of a mixed precision to the object."""

from colossal._src.booster.mixed_precision.base import MixedPrecision
from colossal._src.booster.mixed_precision.bf16 import BF16MixedPrecision
from colossal._src.booster.mixed_precision.fp8 import FP8MixedPrecision
from colossal._src.booster.mixed_precision.fp16_apex import FP16ApexMixedPrecision
from colossal._src.booster.mixed_precision.fp16_naive import FP16NaiveMixedPrecision
from colossal._src.booster.mixed_precision.fp16_torch import FP16TorchMixedPrecision
from colossal._src.booster.mixed_precision.fp32 import FP32MixedPrecision
from colossal.errors import ConfigError

_AVAILABLE: dict[str, type[MixedPrecision]] = {
    "fp16": FP16TorchMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp8": FP8MixedPrecision,
    "fp32": FP32MixedPrecision,
}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """Make the mixed precision of a name.

    Args:
        mixed_precision_type: ``"fp16"``, ``"fp16_apex"``, ``"fp16_naive"``, ``"bf16"``, ``"fp8"`` or ``"fp32"``.

    Returns:
        A new object with its defaults.

    Raises:
        UnsupportedError: ``"fp16_apex"`` without apex.
        ConfigError: There is no such name.

    Example:
        >>> from colossal.booster.mixed_precision import mixed_precision_factory
        >>> type(mixed_precision_factory("bf16")).__name__
        'BF16MixedPrecision'
    """
    if mixed_precision_type not in _AVAILABLE:
        raise ConfigError(
            f"Mixed precision is one of {', '.join(_AVAILABLE)}. Found {mixed_precision_type!r}. Pass one of them."
        )
    return _AVAILABLE[mixed_precision_type]()
