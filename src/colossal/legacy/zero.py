"""ZeRO and Gemini by the names of their first releases: each builds the parts of today."""

from colossal._src.legacy.zero import (
    BaseShardStrategy,
    BucketTensorShardStrategy,
    ChunkManager,
    ChunkManagerSettings,
    GeminiManager,
    LowLevelZeroOptimizer,
    MemStatsCollector,
    ShardedModelV2,
    ShardedOptimizerV2,
    StatefulTensorMgr,
    TensorShardStrategy,
    ZeroDDP,
    ZeroInitContext,
    ZeroOptimizer,
    convert_to_zero_v2,
    init_chunk_manager,
)

__all__ = [
    "BaseShardStrategy",
    "BucketTensorShardStrategy",
    "ChunkManager",
    "ChunkManagerSettings",
    "GeminiManager",
    "LowLevelZeroOptimizer",
    "MemStatsCollector",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "StatefulTensorMgr",
    "TensorShardStrategy",
    "ZeroDDP",
    "ZeroInitContext",
    "ZeroOptimizer",
    "convert_to_zero_v2",
    "init_chunk_manager",
]
