"""Replicated models: TorchDDPPlugin."""

__all__ = []
