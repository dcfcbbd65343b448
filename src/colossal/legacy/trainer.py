"""Training by epochs in the older API: the trainer and its hooks."""

from colossal._src.legacy.trainer import (
    AccuracyHook,
    BaseHook,
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    LossHook,
    LRSchedulerHook,
    Metric,
    SaveCheckpointHook,
    TensorboardHook,
    ThroughputHook,
    Trainer,
)

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "Metric",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
    "Trainer",
]
