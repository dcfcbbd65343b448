"""Optimizer states, gradients and parameters that data-parallel ranks share among themselves."""

from colossal.zero.bucket import Bucket
from colossal.zero.config import ZeroConfig
from colossal.zero.flat_parameters import FlatParameters
from colossal.zero.low_level import shard_optimizer
from colossal.zero.pool import BufferPool, Pool
from colossal.zero.shards import ZeroShards
from colossal.zero.wrapper import zero_model_wrapper, zero_optim_wrapper

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
