"""What models, optimizers and checkpoints of programs build upon by the names of the older API."""

from colossal._src.legacy.interface.hybrid_checkpoint import HybridParallelCheckpointIO, MoECheckpointIO
from colossal._src.legacy.interface.mixins import AMPModelMixin, DistributedOptim
from colossal._src.legacy.interface.param_info import get_param_info
from colossal._src.legacy.interface.shard_options import shard_config_of_groups

__all__ = [
    "AMPModelMixin",
    "DistributedOptim",
    "HybridParallelCheckpointIO",
    "MoECheckpointIO",
    "get_param_info",
    "shard_config_of_groups",
]
