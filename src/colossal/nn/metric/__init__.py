"""Figures of merit of outputs that lie on the tp axis."""

from colossal.nn.metric.accuracy import Accuracy

__all__ = ["Accuracy"]
