"""Attention over sequences that are sharded over several ranks."""

from colossal._src.nn.attention.ring import Mask, ring_attention
from colossal._src.nn.attention.sequence_sharding import SequenceSharding

__all__ = ["Mask", "SequenceSharding", "ring_attention"]
