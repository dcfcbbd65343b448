"""Replicated models: TorchDDPPlugin."""
