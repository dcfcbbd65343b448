"""Generation of text for many requests at once."""

from colossal._src.inference import (
    CompletionOutput,
    EngineStatistics,
    InferenceConfig,
    InferenceEngine,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

__all__ = [
    "CompletionOutput",
    "EngineStatistics",
    "InferenceConfig",
    "InferenceEngine",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
]
