"""Tensor and sequence parallelism for models of Hugging Face, with a plan for each family."""

from colossal._src.shardformer import (
    FAMILIES,
    STYLES,
    GradientCheckpointConfig,
    PipelineGradientCheckpointConfig,
    SequenceParallelConfig,
    ShardConfig,
    ShardFormer,
    StyleContext,
    option_matrix,
    plan_of,
    supported_options,
)

__all__ = [
    "FAMILIES",
    "STYLES",
    "GradientCheckpointConfig",
    "PipelineGradientCheckpointConfig",
    "SequenceParallelConfig",
    "ShardConfig",
    "ShardFormer",
    "StyleContext",
    "option_matrix",
    "plan_of",
    "supported_options",
]
