"""Models of the older API that are built or partitioned into the chunks of a pipeline's ranks."""

from colossal._src.legacy.pipeline.layer_spec import LayerSpec
from colossal._src.legacy.pipeline.model_partition import (
    ModelFromConfig,
    build_pipeline_model,
    build_pipeline_model_from_cfg,
    partition_balanced,
    partition_uniform,
)
from colossal._src.legacy.pipeline.p2p_communication import PipelineP2PCommunication
from colossal._src.legacy.pipeline.pipelinable import PipelinableContext
from colossal._src.legacy.pipeline.schedules import (
    InterleavedSchedule,
    OneForwardOneBackwardSchedule,
    StageSchedule,
    ZeroBubbleVPipeScheduler,
)
from colossal._src.legacy.pipeline.shared_modules import PipelineSharedModuleWrapper, stage_modules_of
from colossal._src.legacy.pipeline.stage_manager import GridStageManager
from colossal._src.legacy.pipeline.v_schedule import PipelineGraph, ScheduledNode

__all__ = [
    "GridStageManager",
    "InterleavedSchedule",
    "LayerSpec",
    "ModelFromConfig",
    "OneForwardOneBackwardSchedule",
    "PipelinableContext",
    "PipelineGraph",
    "PipelineP2PCommunication",
    "PipelineSharedModuleWrapper",
    "ScheduledNode",
    "StageSchedule",
    "ZeroBubbleVPipeScheduler",
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
    "partition_balanced",
    "partition_uniform",
    "stage_modules_of",
]
