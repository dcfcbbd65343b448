"""LowLevelZeroPlugin: partitioned optimizer states and gradients (ZeRO-1 and 2)."""

__all__ = []
