"""Mixed precision by its documented names; programs choose it with `colossal.booster.mixed_precision`."""

from colossal.amp import naive_amp as naive_amp

__all__ = []
