"""`Booster.execute_pipeline` where the model is not split into stages: forward and backward passes of a batch."""

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn

from colossal._src.interface import OptimizerWrapper, unwrap_model
from colossal._src.pipeline import (
    Microbatching,
    lacks_labels,
    map_tensors,
    merge_outputs,
    model_arguments,
    refuse_loss_without_labels,
    split_batch,
)
from colossal.errors import ConfigError


@final
class BatchExecutor:
    """Runs a batch, or its micro-batches in turn, with the arguments and results of a pipeline's executor."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        microbatching: Microbatching | None = None,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model, self._device, self._microbatching, self._no_sync = model, device, microbatching, no_sync
        self._signature = inspect.signature(unwrap_model(model).forward)

    def __call__(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run the next batch: forward, and backward if there is an optimizer and gradients are enabled."""
        optimizer = optimizer if torch.is_grad_enabled() else None
        on_host = next(data_iter)
        batch = map_tensors(on_host, lambda tensor: tensor.to(self._device, non_blocking=True))
        parts = [batch] if self._microbatching is None else split_batch(batch, self._microbatching)
        is_mean = optimizer is not None or len(parts) > 1
        lacking = lacks_labels(on_host, len(parts)) if is_mean else [False] * len(parts)
        losses, left = list[torch.Tensor](), list[Any]()
        for number, (part, checks_loss) in enumerate(zip(parts, lacking, strict=True), start=1):
            # gradients of all micro-batches are reduced once, with those of the last
            with nullcontext() if number == len(parts) else self._no_sync():
                run_criterion = criterion if optimizer or return_loss else None
                outputs, loss = self._run(part, run_criterion, optimizer, len(parts), checks_loss)
            losses += [] if loss is None else [loss]
            left += [map_tensors(outputs, torch.Tensor.detach)] if return_outputs else []
            # else they would stay in memory during the next micro-batch
            del outputs
        return {
            "loss": sum(losses[1:], losses[0]) if return_loss else None,
            "outputs": (left[0] if len(left) == 1 else merge_outputs(left)) if return_outputs else None,
        }

    def _run(
        self,
        batch: Any,
        criterion: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: OptimizerWrapper | None,
        number: int,
        checks_loss: bool,
    ) -> tuple[Any, torch.Tensor | None]:
        """Run one micro-batch; return the outputs and its contribution to the loss."""
        args, kwargs = model_arguments(self._signature, batch)
        with torch.set_grad_enabled(optimizer is not None):
            outputs = self._model(*args, **kwargs)
            loss = None if criterion is None else criterion(outputs, batch)
        if loss is None:
            return outputs, None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                "The criterion takes outputs and inputs and returns the loss, one number in a tensor. Found "
                f"{tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}. Take the mean."
            )
        if checks_loss:
            refuse_loss_without_labels(loss)
        loss = loss if number == 1 else loss / number
        if optimizer is not None:
            with _explain_lost_peers():
                optimizer.backward(loss)
        return outputs, loss.detach()


@contextmanager
def _explain_lost_peers() -> Generator[None]:
    """Say what the other rank refused, if it was its batch: no rank waits in each step for what all have found."""
    try:
        yield
    except Exception as error:
        if "CommunicationError" in f"{type(error).__name__} {error}":  # torch wraps it in a RuntimeError
            error.add_note(
                "If all labels of the batch of another rank are -100, execute_pipeline refused its mean loss there. "
                "Weight the loss by booster.weight_by_tokens on all ranks, or leave such samples out."
            )
        raise
