"""Arithmetic, copies and files where the way they are done matters: fast implementations, and what takes their place.

The names are loaded when they are first used: most programs need few of them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal._src.kernel.adam import AdamStep, AdamTensors, adam_step
    from colossal._src.kernel.memory import huge_zeros, stream_copy

_MODULE_OF = {
    "AdamStep": "colossal._src.kernel.adam",
    "AdamTensors": "colossal._src.kernel.adam",
    "adam_step": "colossal._src.kernel.adam",
    "huge_zeros": "colossal._src.kernel.memory",
    "stream_copy": "colossal._src.kernel.memory",
}


__all__ = [
    "AdamStep",
    "AdamTensors",
    "adam_step",
    "huge_zeros",
    "stream_copy",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal.kernel' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
