"""HybridParallelPlugin: data, tensor, pipeline and sequence parallelism in one model."""
