"""Models of Hugging Face, divided along the tp axis by a table for each family."""

from colossal.shardformer.checkpointing import GradientCheckpointConfig, PipelineGradientCheckpointConfig
from colossal.shardformer.conv1d import Conv1DCol, Conv1DRow
from colossal.shardformer.heads import HeadTable, SharedHeads
from colossal.shardformer.hf_plan import hf_plan
from colossal.shardformer.loss import DividedCausalLoss
from colossal.shardformer.matrix import option_matrix, options_of
from colossal.shardformer.plans import FAMILIES, plan_of
from colossal.shardformer.sequence_mode import SequenceMode, SequenceSharing
from colossal.shardformer.shard_config import ShardConfig
from colossal.shardformer.shardformer import ShardFormer
from colossal.shardformer.styles import STYLES, Division

__all__ = [
    "FAMILIES",
    "STYLES",
    "Conv1DCol",
    "Conv1DRow",
    "DividedCausalLoss",
    "Division",
    "GradientCheckpointConfig",
    "HeadTable",
    "PipelineGradientCheckpointConfig",
    "SequenceMode",
    "SequenceSharing",
    "ShardConfig",
    "ShardFormer",
    "SharedHeads",
    "hf_plan",
    "option_matrix",
    "options_of",
    "plan_of",
]
