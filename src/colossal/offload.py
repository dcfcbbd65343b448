"""Optimizer states on disk, read and written past the page cache while training goes on."""

from colossal._src.offload import (
    DirectIO,
    StateStore,
)

__all__ = ["DirectIO", "StateStore"]
