"""The loss of language models whose logits are divided by vocabulary."""

from typing import Any, final

import torch
from torch.nn import functional

from colossal.cluster import ParallelMesh
from colossal.nn import VocabParallelCrossEntropyLoss

_IGNORED = -100


@final
class DividedCausalLoss:
    """Takes the place of the loss function of a causal language model, for logits of which each rank has some words.

    Args:
        mesh: The mesh.

    Communication: see `colossal.nn.VocabParallelCrossEntropyLoss`.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.shardformer import DividedCausalLoss
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     loss = DividedCausalLoss(ParallelMesh(tp=2))
        ...     return loss(torch.zeros(1, 3, 4), torch.tensor([[0, 5, 7]]), vocab_size=8).exp().round().item()
        >>> run_threads(program, 2)  # each of 8 words is equally likely
        [8.0, 8.0]
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

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
            logits: This rank's words, (batch, tokens, words).
            labels: The tokens, (batch, tokens); each is predicted from those before it.
            vocab_size: The words of all ranks.
            num_items_in_batch: What the sum is divided by; the number of labels by default.
            ignore_index: A label that does not count.
            shift_labels: The labels, shifted already.
            **_others: What other losses take.

        Returns:
            The loss of the whole vocabulary, a scalar; in float32, as that which it takes the place of.
        """
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = VocabParallelCrossEntropyLoss(ignore_index, reduction, num_classes=vocab_size, mesh=self._mesh)
        total = loss(logits.flatten(0, -2).float(), shift_labels.flatten().to(logits.device))
        return total if num_items_in_batch is None else total / num_items_in_batch
