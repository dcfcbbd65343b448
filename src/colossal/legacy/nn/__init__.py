"""Layers by the older names, where they are not those of `colossal.nn`.

The layers of a mode, such as ``Linear2D`` or ``VocabParallelClassifier3D``, are those of `colossal.nn` on a mesh of
that mode, with their arguments in the older order; they and ``VanillaLinear``, ``VanillaClassifier``,
``VanillaLayerNorm`` and ``VanillaPatchEmbedding`` can be imported from here and from `colossal.nn`.
"""

from colossal._src.legacy.nn import (
    AttnMaskType,
    RingAV,
    RingQK,
    TransformerSelfAttentionRing,
    WrappedDropout,
    WrappedDropPath,
    partition_batch,
)
from colossal.legacy.nn import init as init

__all__ = [
    "AttnMaskType",
    "RingAV",
    "RingQK",
    "TransformerSelfAttentionRing",
    "WrappedDropPath",
    "WrappedDropout",
    "partition_batch",
]
