"""Models that take no memory until it is known which part of them is needed."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal._src.lazy.lazy_init import LazyInitContext, lazy_tensors, materialize
    from colossal._src.lazy.pretrained import pretrained_path, remember_path
    from colossal._src.lazy.rank_agreement import describe_operation, recorded_operations, rng_states_of
    from colossal._src.lazy.recipe import GENERATOR_LOCK, RecordedOperation
    from colossal._src.lazy.tensor import LazyTensor

_MODULE_OF = {
    "GENERATOR_LOCK": "colossal._src.lazy.recipe",
    "LazyInitContext": "colossal._src.lazy.lazy_init",
    "LazyTensor": "colossal._src.lazy.tensor",
    "RecordedOperation": "colossal._src.lazy.recipe",
    "describe_operation": "colossal._src.lazy.rank_agreement",
    "lazy_tensors": "colossal._src.lazy.lazy_init",
    "materialize": "colossal._src.lazy.lazy_init",
    "recorded_operations": "colossal._src.lazy.rank_agreement",
    "pretrained_path": "colossal._src.lazy.pretrained",
    "remember_path": "colossal._src.lazy.pretrained",
    "rng_states_of": "colossal._src.lazy.rank_agreement",
}

__all__ = [
    "GENERATOR_LOCK",
    "LazyInitContext",
    "LazyTensor",
    "RecordedOperation",
    "describe_operation",
    "lazy_tensors",
    "materialize",
    "pretrained_path",
    "recorded_operations",
    "remember_path",
    "rng_states_of",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal._src.lazy' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
