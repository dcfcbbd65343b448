"""Training by epochs: the trainer, its hooks, and the metrics that hooks keep."""

from colossal._src.legacy.trainer.base_hook import BaseHook
from colossal._src.legacy.trainer.checkpoint_hook import SaveCheckpointHook
from colossal._src.legacy.trainer.log_hooks import (
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    TensorboardHook,
)
from colossal._src.legacy.trainer.lr_scheduler_hook import LRSchedulerHook
from colossal._src.legacy.trainer.metric_hooks import AccuracyHook, LossHook, ThroughputHook
from colossal._src.legacy.trainer.metrics import Metric
from colossal._src.legacy.trainer.trainer import Trainer

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
