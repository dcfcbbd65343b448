"""Models that take no memory until it is known which part of them is needed."""

from colossal._src.lazy.lazy_init import LazyInitContext
from colossal._src.lazy.materialize import lazy_tensors, materialize
from colossal._src.lazy.tensor import LazyTensor

__all__ = ["LazyInitContext", "LazyTensor", "lazy_tensors", "materialize"]
