"""Losses of logits that are sharded along the tp axis."""

from colossal._src.nn.loss.cross_entropy import CrossEntropyLoss, VocabParallelCrossEntropyLoss

__all__ = ["CrossEntropyLoss", "VocabParallelCrossEntropyLoss"]
