"""Generation for many requests at once, on pages of keys and values."""

from colossal._src.inference.batch_invariance import batch_invariant
from colossal._src.inference.config import InferenceConfig
from colossal._src.inference.engine import InferenceEngine
from colossal._src.inference.logprobs import LogprobGap, logprob_gap, output_logprobs
from colossal._src.inference.online import (
    BatchManagerForGeneration,
    LaunchedEngine,
    ListCache,
    MissCacheError,
    QueueFullError,
    SubmitEntry,
    TaskEntry,
    launch_engine,
)
from colossal._src.inference.requests import CompletionOutput, RequestOutput, TokenLogprob
from colossal._src.inference.sampling_params import SamplingParams
from colossal._src.inference.statistics import EngineStatistics

__all__ = [
    "BatchManagerForGeneration",
    "CompletionOutput",
    "EngineStatistics",
    "InferenceConfig",
    "InferenceEngine",
    "LaunchedEngine",
    "ListCache",
    "LogprobGap",
    "MissCacheError",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "SubmitEntry",
    "TaskEntry",
    "TokenLogprob",
    "batch_invariant",
    "launch_engine",
    "logprob_gap",
    "output_logprobs",
]
