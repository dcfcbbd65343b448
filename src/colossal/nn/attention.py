"""Attention over sequences that are sharded over several ranks."""

from colossal._src.nn.attention import (
    Mask,
    SequenceSharding,
    ring_attention,
)

__all__ = ["Mask", "SequenceSharding", "ring_attention"]
