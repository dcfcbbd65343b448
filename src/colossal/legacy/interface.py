"""What models, optimizers and checkpoints of programs build upon, and options of sharding by process groups."""

from colossal._src.legacy.interface import (
    AMPModelMixin,
    DistributedOptim,
    HybridParallelCheckpointIO,
    MoECheckpointIO,
    get_param_info,
    shard_config_of_groups,
)

__all__ = [
    "AMPModelMixin",
    "DistributedOptim",
    "HybridParallelCheckpointIO",
    "MoECheckpointIO",
    "get_param_info",
    "shard_config_of_groups",
]
