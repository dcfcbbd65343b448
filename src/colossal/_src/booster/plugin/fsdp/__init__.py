"""TorchFSDPPlugin: parameters, gradients and optimizer states sharded by torch's fully_shard."""

__all__ = []
