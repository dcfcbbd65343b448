"""Tensor and sequence parallelism for models of Hugging Face, with a plan for each family."""

from colossal._src.shardformer.activation_checkpointing import (
    GradientCheckpointConfig,
    PipelineGradientCheckpointConfig,
    check_checkpointing,
    checkpoint_layers,
    switch_checkpointing,
)
from colossal._src.shardformer.balance_loss import balance_over_ranks
from colossal._src.shardformer.causal_loss import ParallelCausalLoss
from colossal._src.shardformer.conv1d import Conv1DCol, Conv1DRow
from colossal._src.shardformer.fused_norm import fused_norm_of
from colossal._src.shardformer.generation import ShardedGeneration, sharded_generation_of
from colossal._src.shardformer.head_layers import HeadParallelEmbedding, ReplicatedKVLinear
from colossal._src.shardformer.model_options import MODEL_OPTIONS, apply_options, choose_options
from colossal._src.shardformer.plans import FAMILIES, PlanMaker, check_policy, plan_of, read_plan
from colossal._src.shardformer.plans.hf_plan import hf_plan
from colossal._src.shardformer.sequence_tensor_parallel import shard_tokens
from colossal._src.shardformer.shard_config import MODES_OF_TP, SequenceMode, SequenceParallelConfig, ShardConfig
from colossal._src.shardformer.shardformer import (
    ShardFormer,
    check_expert_exchange,
    check_experts,
    has_sharded_experts,
)
from colossal._src.shardformer.styles import STYLES, StyleContext
from colossal._src.shardformer.support_matrix import option_matrix, supported_options
from colossal._src.shardformer.ties import check_tied_styles

__all__ = [
    "FAMILIES",
    "MODEL_OPTIONS",
    "MODES_OF_TP",
    "STYLES",
    "Conv1DCol",
    "Conv1DRow",
    "GradientCheckpointConfig",
    "HeadParallelEmbedding",
    "ParallelCausalLoss",
    "PipelineGradientCheckpointConfig",
    "PlanMaker",
    "ReplicatedKVLinear",
    "SequenceMode",
    "SequenceParallelConfig",
    "ShardConfig",
    "ShardFormer",
    "ShardedGeneration",
    "StyleContext",
    "apply_options",
    "balance_over_ranks",
    "check_checkpointing",
    "check_expert_exchange",
    "check_experts",
    "check_policy",
    "check_tied_styles",
    "checkpoint_layers",
    "choose_options",
    "fused_norm_of",
    "has_sharded_experts",
    "hf_plan",
    "option_matrix",
    "plan_of",
    "read_plan",
    "shard_tokens",
    "sharded_generation_of",
    "supported_options",
    "switch_checkpointing",
]
