"""The loss of language models whose logits are sharded over the vocabulary or over tokens."""

from typing import Any, final

import torch
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.nn.attention import SequenceSharding
from colossal._src.nn.loss import VocabParallelCrossEntropyLoss

_IGNORED = -100


@final
class ParallelCausalLoss:
    """Replaces the loss function of a causal language model, for sharded logits.

    Gradients are scaled for averaging over ranks: with tokens sharded over n ranks, the gradient on a rank is n times
    that of its local tokens.

    Communication: see `colossal.nn.VocabParallelCrossEntropyLoss`; with sharded tokens all_reduce, sp, 4 bytes forward
    and backward.
    """

    def __init__(
        self, mesh: ParallelMesh, sharding: SequenceSharding | None = None, is_vocab_parallel: bool = True
    ) -> None:
        self._mesh, self._sharding, self._is_vocab_parallel = mesh, sharding, is_vocab_parallel

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
        """Compute the loss."""
        if shift_labels is None:
            # Shifted before they are sharded: the label of the last token of a shard is in the next one.
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        # Counted over all tokens: a mean of means would weigh tokens by how many labels their rank ignores.
        number = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        own = shift_labels if self._sharding is None else self._sharding.split(shift_labels)
        total = self._sum(logits.flatten(0, -2).float(), own.flatten(), vocab_size, ignore_index)
        if self._sharding is not None:
            total = comm.reduce(total, self._sharding.axis, self._mesh)
            total = comm.replicate(total, self._sharding.axis, self._mesh)  # each rank has the gradient of all
        return total / number

    def _sum(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, ignore_index: int) -> torch.Tensor:
        if not self._is_vocab_parallel:
            return functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
        return VocabParallelCrossEntropyLoss(ignore_index, "sum", num_classes=vocab_size, mesh=self._mesh)(
            logits, labels
        )
