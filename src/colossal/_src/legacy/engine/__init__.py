"""The engine of the older API: a boosted model and its optimizer, schedules, gradient handlers, hooks on operators."""

from colossal._src.legacy.engine.engine import Engine
from colossal._src.legacy.engine.gradient_handlers import (
    BaseGradientHandler,
    DataParallelGradientHandler,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
    SequenceParallelGradientHandler,
    ZeROGradientHandler,
)
from colossal._src.legacy.engine.initialize import initialize
from colossal._src.legacy.engine.op_hooks import BaseOpHook
from colossal._src.legacy.engine.pipeline_schedules import InterleavedPipelineSchedule, PipelineSchedule
from colossal._src.legacy.engine.schedules import BaseSchedule, NonPipelineSchedule

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
    "initialize",
]
