"""The documented constructors of loss scalers."""

from colossal._src.amp.dynamic_scaler import DynamicScaler, ScalerConfig
from colossal._src.amp.loss_scaler import LossScaler
from colossal.accelerator import get_current_device

__all__ = ["ConstantGradScaler", "DynamicGradScaler"]


def DynamicGradScaler(  # noqa: N802 (the documented name)
    initial_scale: float = 2**16,
    growth_factor: float = 2,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 2,
    verbose: bool = False,
) -> LossScaler:
    """Make a dynamic loss scaler, for gradients on the current device.

    Args:
        initial_scale: First scale; greater than 0.
        growth_factor: Factor after `growth_interval` steps in a row without an overflow; greater than 1.
        backoff_factor: Factor after a step that overflowed; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        min_scale: The scale does not fall below it; no limit by default.
        max_scale: The scale does not grow above it; no limit by default.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls; at least 1.
        verbose: Log each change of the scale on rank 0.

    Returns:
        A new scaler.

    Raises:
        ConfigError: A value is outside its range.

    Example:
        >>> from colossal.amp.naive_amp import DynamicGradScaler
        >>> DynamicGradScaler(initial_scale=2**10, max_scale=2**20).scale_value
        1024.0
    """
    rule = ScalerConfig(initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis)
    return DynamicScaler(rule, get_current_device().type, verbose=verbose)


def ConstantGradScaler(initial_scale: float, verbose: bool = False) -> LossScaler:  # noqa: N802 (the documented name)
    """Make a loss scaler with a constant scale, for gradients on the current device.

    A step whose gradients overflow is skipped all the same.

    Args:
        initial_scale: The scale; greater than 0.
        verbose: Log each skipped step on rank 0.

    Returns:
        A new scaler.

    Raises:
        ConfigError: The scale is not greater than 0.

    Example:
        >>> from colossal.amp.naive_amp import ConstantGradScaler
        >>> ConstantGradScaler(128.0).scale_value
        128.0
    """
    rule = ScalerConfig(initial_scale, min_scale=initial_scale, max_scale=initial_scale)
    return DynamicScaler(rule, get_current_device().type, verbose=verbose)
