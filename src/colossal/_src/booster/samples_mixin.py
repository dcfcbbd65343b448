"""The verbs of a booster that look at the samples of all data-parallel ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from colossal._src.booster.plugin.base import Plugin

if TYPE_CHECKING:
    from colossal._src.interface import TokenWeighting


class SamplesMixin:
    """What `Booster` does with labels and outputs of all ranks.

    Attributes:
        plugin: The recipe of parallelism.
    """

    plugin: Plugin

    def weight_by_tokens(
        self, labels: torch.Tensor | Sequence[torch.Tensor], *, causal: bool, ignore_index: int = -100
    ) -> "TokenWeighting":
        """Make what weights mean losses so that all labels until the next optimizer step count the same.

        Call it on all ranks before the first backward pass of the step, and the result on every loss.

        Args:
            labels: Those of each batch until the next optimizer step, (samples, ...), as this rank gives them to the
                model; a single tensor if gradients are not accumulated.
            causal: Whether the model predicts each label from the tokens before it, as causal language models of
                transformers do.
            ignore_index: A label that does not count.

        Returns:
            Takes a mean loss and its labels, in `criterion` of `execute_pipeline` those of a micro-batch. Do not divide
            the result by the number of accumulated batches.

        Raises:
            ConfigError: Accumulated batches have different numbers of samples, on any data-parallel rank.
            MeshError: The plugin needs a process group, and none is initialized.

        Communication: all_reduce, dp, 16 bytes; none without a plugin.

        Example:
            >>> import torch
            >>> from colossal.booster import Booster
            >>> model, booster = torch.nn.Linear(2, 3), Booster(device="cpu")
            >>> model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> batches = [(torch.ones(2, 2), torch.tensor([0, 1])), (torch.ones(2, 2), torch.tensor([2, -100]))]
            >>> weight = booster.weight_by_tokens([labels for _, labels in batches], causal=False)
            >>> for x, labels in batches:
            ...     booster.backward(weight(torch.nn.functional.cross_entropy(model(x), labels), labels), optimizer)
            >>> weight.num_labels
            3
        """
        from colossal._src.interface import TokenWeighting

        mesh, _ = self.plugin.mesh_and_axes_to_compare()
        _, num_replicas = self.plugin.data_parallel_rank_and_size()
        mesh = mesh if num_replicas > 1 else None
        return TokenWeighting(labels, causal=causal, ignore_index=ignore_index, mesh=mesh)

    def gather_for_metrics(self, values: Any, dataloader: DataLoader[Any]) -> Any:
        """Gather what metrics are computed from, such as predictions and labels, of all samples of the current batch.

        Samples that the loader repeated, to give each rank as many as the others, are left out: over an epoch every
        sample comes once, on any number of ranks. Without ``shuffle`` they come in the order of the dataset.

        Args:
            values: A tensor, (samples, ...), or a mapping or sequence of such tensors. Under a pipeline, only the rank
                with the last stage has outputs: pass None in their place on the others, as `execute_pipeline` returns.
            dataloader: The loader that the batch is from, of the plugin's `prepare_dataloader`.

        Returns:
            The same structure with tensors (samples of all data-parallel ranks, ...), on all ranks.

        Raises:
            ConfigError: The loader is another one, or shapes or values of tensors do not fit; on all ranks.

        Communication: all_gather, dp, the result's bytes; under a pipeline also through the host, pp.
        """
        from colossal._src.booster.gather_samples import gather_samples

        mesh, _ = self.plugin.mesh_and_axes_to_compare()
        return gather_samples(values, dataloader, mesh)
