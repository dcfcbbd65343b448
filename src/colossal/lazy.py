"""Models that take no memory until it is known which part of them is needed."""

from colossal._src.lazy import (
    LazyInitContext,
    LazyTensor,
    lazy_tensors,
    materialize,
)

__all__ = ["LazyInitContext", "LazyTensor", "lazy_tensors", "materialize"]
