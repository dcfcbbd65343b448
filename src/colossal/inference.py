"""Generation of text for many requests at once."""

from colossal._src.inference import (
    BatchManagerForGeneration,
    CompletionOutput,
    EngineStatistics,
    InferenceConfig,
    InferenceEngine,
    LaunchedEngine,
    ListCache,
    MissCacheError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    SubmitEntry,
    TaskEntry,
    TokenLogprob,
    launch_engine,
)

__all__ = [
    "BatchManagerForGeneration",
    "CompletionOutput",
    "EngineStatistics",
    "InferenceConfig",
    "InferenceEngine",
    "LaunchedEngine",
    "ListCache",
    "MissCacheError",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "SubmitEntry",
    "TaskEntry",
    "TokenLogprob",
    "launch_engine",
]
