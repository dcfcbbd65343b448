"""States on disk: files of tensors, read and written past the operating system's cache while training goes on.

The names are loaded when they are first used: most programs keep nothing on disk.
"""

from colossal._src.offload import (
    StateStore,
)

__all__ = ["StateStore"]
