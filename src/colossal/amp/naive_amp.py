"""The documented constructors of loss scalers."""

from colossal._src.amp import (
    ConstantGradScaler,
    DynamicGradScaler,
)

__all__ = ["ConstantGradScaler", "DynamicGradScaler"]
