"""Losses of logits that lie on the tp axis, and of tokens that are divided unevenly among micro-batches and ranks."""

from colossal.nn.loss.cross_entropy import CrossEntropyLoss, VocabParallelCrossEntropyLoss

__all__ = ["CrossEntropyLoss", "VocabParallelCrossEntropyLoss"]
