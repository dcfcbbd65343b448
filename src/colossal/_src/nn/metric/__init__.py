"""Metrics of outputs that are sharded along the tp axis."""

from colossal._src.nn.metric.accuracy import Accuracy

__all__ = ["Accuracy"]
