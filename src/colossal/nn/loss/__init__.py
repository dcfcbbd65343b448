"""Losses of logits that lie on the tp axis, and of tokens that are divided unevenly among micro-batches and ranks."""

from colossal.nn.loss.cross_entropy import CrossEntropyLoss, VocabParallelCrossEntropyLoss
from colossal.nn.loss.token_weighting import TokenWeighting

__all__ = ["CrossEntropyLoss", "TokenWeighting", "VocabParallelCrossEntropyLoss"]
