"""Numerical precision of a training step: what runs in half precision, and how the loss is scaled."""

__all__ = []
