"""Models that take no memory until each rank knows which part of them it needs."""

from colossal._src.lazy import (
    LazyInitContext,
    LazyTensor,
    lazy_tensors,
    materialize,
)

__all__ = ["LazyInitContext", "LazyTensor", "lazy_tensors", "materialize"]
