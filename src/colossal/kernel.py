"""Arithmetic, copies and files where the way they are done matters: fast implementations, and what takes their place.

The names are loaded when they are first used: most programs need few of them.
"""

from colossal._src.kernel import (
    AdamStep,
    AdamTensors,
    adam_step,
    huge_zeros,
)

__all__ = ["AdamStep", "AdamTensors", "adam_step", "huge_zeros"]
