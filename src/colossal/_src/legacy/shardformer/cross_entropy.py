"""The loss over a sharded vocabulary, and the log-probabilities of labels, as functions."""

from typing import Literal

import torch
from torch import distributed as dist
from torch.nn import functional

from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.shardformer.group_layer import Group, mesh_of
from colossal._src.nn.loss import VocabParallelCrossEntropyLoss
from colossal._src.shardformer import ShardConfig
from colossal.errors import ConfigError, UnsupportedError


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


def dist_cross_entropy(
    labels: torch.Tensor,
    logits: torch.Tensor,
    shard_config: ShardConfig,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    seq_dim: int = 1,
) -> torch.Tensor:
    """Compute the loss of a causal language model whose ranks have some of the vocabulary.

    Superseded by the loss that `colossal.shardformer.ShardFormer` gives a model.

    Args:
        labels: The classes of all tokens, (samples, tokens): the logits of each token are for the label of the next.
        logits: This rank's classes, (samples, tokens, classes); all of them where there is no tensor parallelism, or
            not `ShardConfig.parallel_output`.
        shard_config: How the model is sharded.
        vocab_size: The number of classes of all ranks.
        dtype: What the logits are converted to first; by default they stay as they are, and float32 is computed with.
        seq_dim: The dimension of tokens.

    Returns:
        The mean over labels other than -100, a scalar, on all ranks.

    Raises:
        ShapeError: The shapes do not fit.
        UnsupportedError: Ranks have some of the tokens.

    Communication: as `VocabParallelCrossEntropyLoss`.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import dist_cross_entropy
        >>> from colossal.shardformer import ShardConfig
        >>> labels = torch.tensor([[0, 3, 1]])
        >>> dist_cross_entropy(labels, torch.zeros(1, 3, 4), ShardConfig(), 4).exp().round().item()
        4.0
    """
    shifted, of_next = _shift(labels, logits, shard_config, seq_dim)
    group = _group_of(shard_config)
    if group is None:
        return _loss_of_full(shifted, of_next, dtype, "mean")
    return cross_entropy_1d(shifted, of_next, -100, group, vocab_size, dtype)


def dist_log_prob(
    labels: torch.Tensor,
    logits: torch.Tensor,
    shard_config: ShardConfig,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    seq_dim: int = 1,
) -> torch.Tensor:
    """Compute the log-probabilities of next tokens, of a causal language model whose ranks have some of the vocabulary.

    Args:
        labels: The classes of all tokens, (samples, tokens).
        logits: This rank's classes, as of `dist_cross_entropy`.
        shard_config: How the model is sharded.
        vocab_size: The number of classes of all ranks.
        dtype: What the logits are converted to first; by default they stay as they are, and float32 is computed with.
        seq_dim: The dimension of tokens.

    Returns:
        Those of the second label and the following, (samples, tokens - 1, 1), on all ranks.

    Raises:
        ShapeError: The shapes do not fit.
        UnsupportedError: Ranks have some of the tokens.

    Communication: as `VocabParallelCrossEntropyLoss`.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import dist_log_prob
        >>> from colossal.shardformer import ShardConfig
        >>> dist_log_prob(torch.tensor([[0, 3, 1]]), torch.zeros(1, 3, 4), ShardConfig(), 4).shape
        torch.Size([1, 2, 1])
    """
    shifted, of_next = _shift(labels, logits, shard_config, seq_dim)
    group = _group_of(shard_config)
    if group is None:
        return -_loss_of_full(shifted, of_next, dtype, "none").view_as(of_next).unsqueeze(-1)
    return dist_log_prob_1d(shifted, of_next, group, vocab_size, dtype)


def _shift(
    labels: torch.Tensor, logits: torch.Tensor, shard_config: ShardConfig, seq_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the logits of each token beside the label of the next."""
    mesh = shard_config.mesh or (current_mesh() if dist.is_initialized() else None)
    if mesh is not None and shard_config.sequence_parallel_config(mesh) is not None:
        raise UnsupportedError(
            "The loss of tokens that ranks share needs the label of another rank's token. Found "
            f"enable_sequence_parallelism=True on {mesh}. Let the model compute it: ShardFormer gives it that loss, "
            "and model(input_ids, labels=labels) returns it."
        )
    length = labels.shape[seq_dim]
    return logits.narrow(seq_dim, 0, length - 1), labels.narrow(seq_dim, 1, length - 1)


def _group_of(shard_config: ShardConfig) -> Group:
    """The ranks over which a model leaves the classes of its logits sharded; None if all have all."""
    mesh = shard_config.mesh or (current_mesh() if dist.is_initialized() else None)
    is_sharded = mesh is not None and shard_config.parallel_output and shard_config.shards_tensors(mesh)
    return mesh.group("tp") if mesh is not None and is_sharded else None


def _loss_of_full(
    logits: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype | None, reduction: str
) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32) if dtype is None else dtype)
    return functional.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction=reduction)


def _mesh_of(process_group: Group) -> ParallelMesh | None:
    return None if process_group is None and not dist.is_initialized() else mesh_of(process_group)
