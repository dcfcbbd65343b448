"""Losses of logits that lie on the tp axis."""

from colossal.nn.loss.cross_entropy import CrossEntropyLoss, VocabParallelCrossEntropyLoss

__all__ = ["CrossEntropyLoss", "VocabParallelCrossEntropyLoss"]
