"""One mean over all tokens of an optimizer step, where means are taken of micro-batches, ranks and batches apart."""

from collections.abc import Sequence
from typing import final

import torch

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal.errors import ConfigError


@final
class TokenWeighting:
    """Weights the mean loss of a micro-batch by its number of labels, so that all labels of a step count the same.

    Gradients are averaged over micro-batches and data-parallel ranks, and added up over accumulated batches. If each of
    them has another number of labels that are not -100, this mean of means is not the mean over all labels, and depends
    on how the batch is split. With weighted losses it is the loss of one process on all samples at once, and so is
    every gradient. `Booster.weight_by_tokens` makes the object for the ranks of its plugin.

    Communication: when it is built, all_reduce, dp, 16 bytes; none when it is called.
    """

    def __init__(
        self,
        labels: torch.Tensor | Sequence[torch.Tensor],
        *,
        causal: bool,
        ignore_index: int = -100,
        mesh: ParallelMesh | None = None,
    ) -> None:
        batches = [labels] if isinstance(labels, torch.Tensor) else list(labels)
        self._causal, self._ignore_index = causal, ignore_index
        sizes = [len(batch) for batch in batches]
        self._num_samples, self._num_ranks = sizes[0], 1 if mesh is None else mesh.size("dp")
        counts = torch.stack([self._count(batch) for batch in batches])
        totals = torch.stack([counts.sum(), torch.tensor(int(len(set(sizes)) > 1), device=counts.device)])
        totals = totals.cpu()  # where they are needed; labels that have not moved yet need not be waited for
        if mesh is not None:
            totals = Channel("dp", mesh).all_reduce(totals)
        self.num_labels, num_uneven = map(int, totals.tolist())
        if num_uneven:
            raise ConfigError(
                "Accumulated batches must have the same number of samples, which determines the size of a micro-batch. "
                f"Found {sizes} on this rank, and different numbers on {num_uneven} ranks. Leave the last "
                "batch out by drop_last=True, or step after it."
            )

    def __call__(self, loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Weight a loss."""
        if not len(labels) or self._num_samples % len(labels):
            raise ConfigError(
                f"A micro-batch must have a divisor of the {self._num_samples} samples of a batch whose labels were "
                f"counted. Found labels of {len(labels)} samples. Count the labels of every batch until the next "
                "optimizer step."
            )
        if not self.num_labels:
            return loss
        count = self._count(labels).to(loss.device)
        num_means = self._num_samples // len(labels) * self._num_ranks
        weight = (count.double() * (num_means / self.num_labels)).to(loss.dtype)
        return torch.where(count > 0, loss * weight, 0.0)  # without labels the mean is NaN

    def _count(self, labels: torch.Tensor) -> torch.Tensor:
        return ((labels[:, 1:] if self._causal else labels) != self._ignore_index).sum()
