"""The documented constructors of loss scalers."""

from colossal._src.amp.naive_amp import (
    ConstantGradScaler,
    DynamicGradScaler,
)

__all__ = ["ConstantGradScaler", "DynamicGradScaler"]
