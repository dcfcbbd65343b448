"""Models that take no memory until it is known which part of them is needed."""

from colossal._src.lazy.generator import GENERATOR_LOCK
from colossal._src.lazy.lazy_init import LazyInitContext
from colossal._src.lazy.materialize import lazy_tensors, materialize
from colossal._src.lazy.pretrained import pretrained_path, remember_path
from colossal._src.lazy.rank_agreement import describe, operations_of, rng_states_of
from colossal._src.lazy.recipe import Operation
from colossal._src.lazy.tensor import LazyTensor

__all__ = [
    "GENERATOR_LOCK",
    "LazyInitContext",
    "LazyTensor",
    "Operation",
    "describe",
    "lazy_tensors",
    "materialize",
    "operations_of",
    "pretrained_path",
    "remember_path",
    "rng_states_of",
]
