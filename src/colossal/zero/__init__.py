"""ZeRO: optimizer states, gradients and parameters that are partitioned over data-parallel ranks."""

from colossal.zero.bucket import Bucket
from colossal.zero.buffer_pool import BufferPool, Pool
from colossal.zero.flat_parameters import FlatParameters
from colossal.zero.low_level import shard_optimizer
from colossal.zero.wrapper import zero_model_wrapper, zero_optim_wrapper
from colossal.zero.zero_config import ZeroConfig
from colossal.zero.zero_shards import ZeroShards

__all__ = [
    "Bucket",
    "BufferPool",
    "FlatParameters",
    "Pool",
    "ZeroConfig",
    "ZeroShards",
    "shard_optimizer",
    "zero_model_wrapper",
    "zero_optim_wrapper",
]
