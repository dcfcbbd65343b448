"""`Booster.execute_pipeline` where the model is not divided into stages: a forward and a backward pass of the batch."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import nn

from colossal.interface import OptimizerWrapper, innermost
from colossal.pipeline import arguments_of, map_tensors


@final
class BatchExecutor:
    """Runs a batch as one, with the arguments and results of an executor of pipelines.

    Args:
        model: The boosted model.
        device: Where its inputs go.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._signature = inspect.signature(innermost(model).forward)

    def __call__(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run the next batch: forward, and backward if there is an optimizer and gradients are enabled.

        Args:
            data_iter: Yields batches: mappings are passed by name, of a tuple the model gets as many as it takes.
            criterion: Takes outputs and inputs, returns the loss.
            optimizer: Does the backward pass.
            return_loss: Return the loss, without a graph.
            return_outputs: Return the outputs.

        Returns:
            ``{"loss": ..., "outputs": ...}``; None for what was not asked for.
        """
        trains = optimizer is not None and torch.is_grad_enabled()
        batch = map_tensors(next(data_iter), lambda tensor: tensor.to(self._device, non_blocking=True))
        args, kwargs = arguments_of(self._signature, batch)
        with torch.set_grad_enabled(trains):
            outputs = self._model(*args, **kwargs)
            loss = criterion(outputs, batch) if trains or return_loss else None
        if trains:
            assert optimizer is not None
            assert loss is not None
            optimizer.backward(loss)
        return {
            "loss": loss.detach() if return_loss and loss is not None else None,
            "outputs": map_tensors(outputs, torch.Tensor.detach) if return_outputs else None,
        }
