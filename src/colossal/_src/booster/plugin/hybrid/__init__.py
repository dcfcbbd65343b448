"""HybridParallelPlugin: data, tensor, pipeline and sequence parallelism in one model."""

__all__ = []
