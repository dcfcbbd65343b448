"""The step of Adam in one pass over memory, and memory in huge pages."""

from colossal._src.kernel import (
    AdamStep,
    AdamTensors,
    adam_step,
    huge_zeros,
)

__all__ = ["AdamStep", "AdamTensors", "adam_step", "huge_zeros"]
