"""Tensor and sequence parallelism for models of Hugging Face, with a plan for each family."""

from colossal.shardformer.activation_checkpointing import GradientCheckpointConfig, PipelineGradientCheckpointConfig
from colossal.shardformer.causal_loss import ParallelCausalLoss
from colossal.shardformer.conv1d import Conv1DCol, Conv1DRow
from colossal.shardformer.head_layers import HeadParallelEmbedding, ReplicatedKVLinear
from colossal.shardformer.hf_plan import hf_plan
from colossal.shardformer.plans import FAMILIES, plan_of
from colossal.shardformer.sequence_parallel_config import SequenceMode, SequenceParallelConfig
from colossal.shardformer.shard_config import ShardConfig
from colossal.shardformer.shardformer import ShardFormer
from colossal.shardformer.styles import STYLES, StyleContext
from colossal.shardformer.support_matrix import option_matrix, supported_options

__all__ = [
    "FAMILIES",
    "STYLES",
    "Conv1DCol",
    "Conv1DRow",
    "GradientCheckpointConfig",
    "HeadParallelEmbedding",
    "ParallelCausalLoss",
    "PipelineGradientCheckpointConfig",
    "ReplicatedKVLinear",
    "SequenceMode",
    "SequenceParallelConfig",
    "ShardConfig",
    "ShardFormer",
    "StyleContext",
    "hf_plan",
    "option_matrix",
    "plan_of",
    "supported_options",
]
