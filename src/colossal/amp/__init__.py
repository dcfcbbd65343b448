"""Mixed precision by its documented names; programs choose it with `colossal.booster.mixed_precision`."""

from colossal._src.amp import LossScaler, MasterParams, quantize_fp8
from colossal.amp import naive_amp as naive_amp

__all__ = ["LossScaler", "MasterParams", "quantize_fp8"]
