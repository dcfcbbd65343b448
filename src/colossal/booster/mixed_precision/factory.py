"""From the name of a mixed precision to the object."""

from colossal.booster.mixed_precision.base import MixedPrecision
from colossal.booster.mixed_precision.bf16 import BF16MixedPrecision
from colossal.booster.mixed_precision.fp16_torch import FP16TorchMixedPrecision
from colossal.errors import ConfigError, UnsupportedError

_AVAILABLE = {"fp16": FP16TorchMixedPrecision, "bf16": BF16MixedPrecision}
_NEAREST = {"fp16_apex": "fp16", "fp16_naive": "fp16", "fp8": "bf16"}


def mixed_precision_factory(name: str) -> MixedPrecision:
    """Make the mixed precision of a name.

    Args:
        name: ``"fp16"`` or ``"bf16"``.

    Returns:
        A new object with its defaults.

    Raises:
        UnsupportedError: The name is documented, but not built yet.
        ConfigError: There is no such name.

    Example:
        >>> from colossal.booster.mixed_precision import mixed_precision_factory
        >>> type(mixed_precision_factory("bf16")).__name__
        'BF16MixedPrecision'
    """
    if name in _NEAREST:
        raise UnsupportedError(
            f"Mixed precision is one of {', '.join(_AVAILABLE)}. Found {name!r}, which is not built yet. "
            f"The nearest that works is {_NEAREST[name]!r}."
        )
    if name not in _AVAILABLE:
        raise ConfigError(f"Mixed precision is one of {', '.join(_AVAILABLE)}. Found {name!r}. Pass one of them.")
    return _AVAILABLE[name]()
