"""Vision transformers whose feed-forward layers are experts."""

from colossal._src.legacy.model_zoo import VanillaFFN, ViTMoE, Widenet

__all__ = ["VanillaFFN", "ViTMoE", "Widenet"]
