"""ZeRO: optimizer states, gradients and parameters that are partitioned over data-parallel ranks."""

from colossal._src.zero.bucket import Bucket
from colossal._src.zero.buffer_pool import BufferPool, Pool
from colossal._src.zero.flat_parameters import FlatParameters
from colossal._src.zero.gemini.wrapper import zero_model_wrapper, zero_optim_wrapper
from colossal._src.zero.low_level import shard_optimizer
from colossal._src.zero.partitions import Partitions
from colossal._src.zero.zero_config import ZeroConfig
from colossal._src.zero.zero_shards import ZeroShards

__all__ = [
    "Bucket",
    "BufferPool",
    "FlatParameters",
    "Partitions",
    "Pool",
    "ZeroConfig",
    "ZeroShards",
    "shard_optimizer",
    "zero_model_wrapper",
    "zero_optim_wrapper",
]
