"""ZeRO and Gemini by the names of their first releases, which build the parts of today."""

from colossal._src.legacy.zero.chunk_names import (
    ChunkManager,
    ChunkManagerSettings,
    init_chunk_manager,
    search_configuration_of_chunks,
)
from colossal._src.legacy.zero.gemini_names import (
    GeminiManager,
    MemStatsCollector,
    StatefulTensorMgr,
    ZeroDDP,
    ZeroOptimizer,
)
from colossal._src.legacy.zero.low_level_optimizer import LowLevelZeroOptimizer
from colossal._src.legacy.zero.sharded_model import (
    BaseShardStrategy,
    BucketTensorShardStrategy,
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroInitContext,
    convert_to_zero_v2,
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
    "search_configuration_of_chunks",
]
