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

    Args:
        labels: Those of each batch until the next optimizer step, (samples, ...), as this rank gives them to the model;
            a single tensor if gradients are not accumulated. All have as many samples.
        causal: Whether the model predicts each label from the tokens before it, as causal language models of
            transformers do: the first of a sequence does not count then.
        ignore_index: A label that does not count.
        mesh: The mesh along whose dp axis gradients are averaged; None if this process trains alone.

    Attributes:
        num_labels: How many labels count, of all batches and data-parallel ranks.

    Raises:
        ConfigError: Batches have different numbers of samples, on any data-parallel rank.

    Communication: when it is built, all_reduce, dp, 16 bytes; none when it is called.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from colossal.interface import TokenWeighting
        >>> logits = torch.eye(3)[None].repeat(2, 2, 1)  # (samples, tokens, classes)
        >>> labels = torch.tensor([[0, 1, 2, 1, 1, 2], [0, -100, -100, -100, -100, -100]])
        >>> weight = TokenWeighting(labels, causal=False)
        >>> losses = [weight(cross_entropy(logits[i], labels[i]), labels[i : i + 1]) for i in range(2)]
        >>> bool(torch.stack(losses).mean().isclose(cross_entropy(logits.flatten(0, 1), labels.flatten())))
        True
    """

    def __init__(
        self,
        labels: torch.Tensor | Sequence[torch.Tensor],
        *,
        causal: bool,
        ignore_index: int = -100,
        mesh: ParallelMesh | None = None,
    ) -> None:
        self._causal, self._ignore_index = causal, ignore_index
        batches = [labels] if isinstance(labels, torch.Tensor) else list(labels)
        for batch in batches or [None]:
            self._check(batch)
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
        """Weight a loss.

        Args:
            loss: The mean over the labels that count of a micro-batch, or of a batch that is not split.
            labels: Its labels, (samples, ...), as they were counted; also those that do not count.

        Returns:
            The weighted loss, to call backward on. Its mean over micro-batches and data-parallel ranks, summed over
            accumulated batches, is the mean loss of all labels; zero without any. If there are none in the entire step,
            the loss as it is.

        Raises:
            ConfigError: The number of samples does not divide that of a counted batch.
        """
        self._check(labels)
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

    def _check(self, labels: object) -> None:
        num_dims = 2 if self._causal else 1
        if isinstance(labels, torch.Tensor) and labels.ndim >= num_dims:
            return
        shape = f"shape {tuple(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise ConfigError(
            f"Labels are counted in tensors, of shape (samples, ...), and with causal=True (samples, tokens). Found "
            f"{'none' if labels is None else shape} and causal={self._causal}. Pass labels such as batch['labels'] of "
            "each batch until the next optimizer step, and causal=False if each sample has one, as for a classifier."
        )

    def _count(self, labels: torch.Tensor) -> torch.Tensor:
        return ((labels[:, 1:] if self._causal else labels) != self._ignore_index).sum()
