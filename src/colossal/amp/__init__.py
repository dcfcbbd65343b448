"""Mixed precision by its documented names; programs choose it with `colossal.booster.mixed_precision`."""

__all__ = []
