"""Attention over sequences that several ranks share."""

from colossal.nn.attention.ring import Mask, ring_attention
from colossal.nn.attention.tokens import TokenCut

__all__ = ["Mask", "TokenCut", "ring_attention"]
