"""The loss over a sharded vocabulary, and the log-probabilities of labels, as functions."""

from typing import Literal

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.shardformer.group_layer import Group, mesh_of
from colossal._src.nn.loss import VocabParallelCrossEntropyLoss
from colossal.errors import ConfigError


def cross_entropy_1d(
    vocab_logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    process_group: Group = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    mode: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """Compute the cross-entropy of logits whose classes are sharded over a process group.

    Args:
        vocab_logits: This rank's classes, (tokens, ..., classes).
        labels: The classes among all, (tokens, ...).
        ignore_index: A label that does not count.
        process_group: The ranks over which the classes are sharded; by default those of the tp axis of the ambient
            mesh, or all.
        vocab_size: The number of classes of all ranks; by default as many as they have.
        dtype: What the logits are converted to first; by default they stay as they are, and float32 is computed with.
        mode: The mean or the sum over the labels that count.

    Returns:
        The loss, a scalar, on all ranks.

    Raises:
        ConfigError: There is no such mode.
        ShapeError: The shapes do not fit.
        IndexError: A label is no class.

    Communication: as `VocabParallelCrossEntropyLoss`.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import cross_entropy_1d
        >>> cross_entropy_1d(torch.zeros(2, 4), torch.tensor([0, 3])).exp().round().item()
        4.0
    """
    superseded("colossal.shardformer.layer.cross_entropy_1d", "colossal.nn.VocabParallelCrossEntropyLoss()")
    mesh = _mesh_of(process_group)
    if mode not in ("mean", "sum"):
        raise ConfigError(f"The mode is 'mean' or 'sum'. Found {mode!r}. Pass one of them.")
    loss = VocabParallelCrossEntropyLoss(ignore_index, mode, num_classes=vocab_size, mesh=mesh)
    return loss(vocab_logits if dtype is None else vocab_logits.to(dtype), labels)


def dist_log_prob_1d(
    vocab_logits: torch.Tensor,
    labels: torch.Tensor,
    process_group: Group = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the log-probability of each label, of logits whose classes are sharded over a process group.

    Args:
        vocab_logits: This rank's classes, (tokens, ..., classes).
        labels: The classes among all, (tokens, ...).
        process_group: The ranks over which the classes are sharded; by default those of the tp axis of the ambient
            mesh, or all.
        vocab_size: The number of classes of all ranks; by default as many as they have.
        dtype: What the logits are converted to first; by default they stay as they are, and float32 is computed with.

    Returns:
        The log-probabilities, (tokens, ..., 1), on all ranks; 0 for a label of -100.

    Raises:
        ShapeError: The shapes do not fit.
        IndexError: A label is no class.

    Communication: as `VocabParallelCrossEntropyLoss`.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import dist_log_prob_1d
        >>> dist_log_prob_1d(torch.zeros(2, 4), torch.tensor([0, 3])).exp().round(decimals=4)
        tensor([[0.2500],
                [0.2500]])
    """
    superseded(
        "colossal.shardformer.layer.dist_log_prob_1d", '-colossal.nn.VocabParallelCrossEntropyLoss(reduction="none")'
    )
    mesh = _mesh_of(process_group)
    loss = VocabParallelCrossEntropyLoss(reduction="none", num_classes=vocab_size, mesh=mesh)
    return -loss(vocab_logits if dtype is None else vocab_logits.to(dtype), labels).unsqueeze(-1)


def _mesh_of(process_group: Group) -> ParallelMesh | None:
    return None if process_group is None and not dist.is_initialized() else mesh_of(process_group)
