"""The engine of the older API: model, optimizer and criterion in one object, with the features of a config."""

from colossal._src.legacy.engine import (
    BaseGradientHandler,
    BaseOpHook,
    BaseSchedule,
    DataParallelGradientHandler,
    Engine,
    InterleavedPipelineSchedule,
    MoeGradientHandler,
    NonPipelineSchedule,
    PipelineSchedule,
    PipelineSharedModuleGradientHandler,
    SequenceParallelGradientHandler,
    ZeROGradientHandler,
)

__all__ = [
    "BaseGradientHandler",
    "BaseOpHook",
    "BaseSchedule",
    "DataParallelGradientHandler",
    "Engine",
    "InterleavedPipelineSchedule",
    "MoeGradientHandler",
    "NonPipelineSchedule",
    "PipelineSchedule",
    "PipelineSharedModuleGradientHandler",
    "SequenceParallelGradientHandler",
    "ZeROGradientHandler",
]
