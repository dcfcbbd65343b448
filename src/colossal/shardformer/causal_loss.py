"""The loss of language models whose logits are divided, by vocabulary or by tokens."""

from typing import Any, final

import torch
from torch.nn import functional

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.nn import VocabParallelCrossEntropyLoss
from colossal.nn.attention import SequenceSharding

_IGNORED = -100


@final
class ParallelCausalLoss:
    """Takes the place of the loss function of a causal language model, for logits of which each rank has a part.

    The gradient is that of ranks whose gradients are averaged: with tokens divided among n ranks, n times that of its
    own tokens.

    Args:
        mesh: The mesh.
        cut: Which tokens each rank has; None for all.
        is_vocab_parallel: Whether the tp axis divides the words.

    Communication: see `colossal.nn.VocabParallelCrossEntropyLoss`; with divided tokens all_reduce, sp, 4 bytes forward
    and backward.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer import ParallelCausalLoss
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     loss = ParallelCausalLoss(ParallelMesh(tp=2))
        ...     return loss(torch.zeros(1, 3, 4), torch.tensor([[0, 5, 7]]), vocab_size=8).exp().round().item()
        >>> run_threads(program, 2)  # each of 8 words is equally likely
        [8.0, 8.0]
    """

    def __init__(self, mesh: ParallelMesh, cut: SequenceSharding | None = None, is_vocab_parallel: bool = True) -> None:
        self._mesh, self._cut, self._divides_words = mesh, cut, is_vocab_parallel

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_others: Any,
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            logits: Of this rank's tokens and words, (batch, tokens, words).
            labels: All tokens, (batch, tokens); each is predicted from those before it.
            vocab_size: The words of all ranks.
            num_items_in_batch: What the sum is divided by; the number of labels by default.
            ignore_index: A label that does not count.
            shift_labels: The labels, shifted already.
            **_others: What other losses take.

        Returns:
            The loss of all tokens and words, a scalar; in float32, as that which it takes the place of.
        """
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        number = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        own = shift_labels if self._cut is None else self._cut.split(shift_labels)
        total = self._sum(logits.flatten(0, -2).float(), own.flatten(), vocab_size, ignore_index)
        if self._cut is not None:
            total = comm.reduce(total, self._cut.axis, self._mesh)
            total = comm.replicate(total, self._cut.axis, self._mesh)  # each rank has the gradient of all
        return total / number

    def _sum(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, ignore_index: int) -> torch.Tensor:
        if not self._divides_words:
            return functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
        return VocabParallelCrossEntropyLoss(ignore_index, "sum", num_classes=vocab_size, mesh=self._mesh)(
            logits, labels
        )
