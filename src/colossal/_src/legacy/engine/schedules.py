"""How a batch goes through the model of an engine at once, and what any schedule makes of a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from colossal._src.legacy.registry import SCHEDULE
from colossal._src.pipeline import map_tensors
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError

Results = tuple[Any, Any, torch.Tensor | None]
"""Output, label and loss; None for what a rank does not have, or was not asked for."""

_LABEL = "label"
_DATA_AND_LABEL = 2


class BaseSchedule:
    """A forward and a backward pass of a batch; override `forward_backward_step`, and assign it to `Engine.schedule`.

    Args:
        data_process_func: Makes data and label of a batch; ``data, label = batch`` by default, or of a mapping its
            entry ``label`` and all others.

    Attributes:
        batch_size: Number of samples of the batch that was loaded last.
        data_process_func: As passed.

    Example:
        >>> import torch
        >>> from colossal.legacy.engine import BaseSchedule, Engine
        >>> class Twice(BaseSchedule):
        ...     def forward_backward_step(self, engine, data_iter, forward_only=False, **options):
        ...         x, y = self.load_batch(data_iter)
        ...         loss = engine.criterion(engine(engine(x)), y)
        ...         engine.backward(loss)
        ...         return None, None, loss
        >>> model = torch.nn.Linear(1, 1)
        >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(), schedule=Twice())
        >>> _, _, loss = engine.execute_schedule(iter([(torch.ones(3, 1), torch.ones(3, 1))]))
        >>> loss.shape, engine.schedule.batch_size
        (torch.Size([]), 3)
    """

    def __init__(self, data_process_func: Callable[..., Any] | None = None) -> None:
        self.data_process_func = data_process_func
        self.batch_size = 0

    def pre_processing(self, engine: Any) -> None:
        """Prepare an engine for this schedule; by default nothing.

        Args:
            engine: The engine.
        """

    def load_batch(self, data_iter: Iterator[Any], to_gpu: bool = True) -> Any:
        """Take the next batch, and note its size.

        Args:
            data_iter: Yields batches.
            to_gpu: Move its tensors to the device of this rank.

        Returns:
            The batch.

        Raises:
            ConfigError: There is no iterator.
            StopIteration: There is no batch left.
        """
        if data_iter is None:
            raise ConfigError("A schedule takes batches from an iterator. Found None. Pass iter(dataloader).")
        batch = next(data_iter)
        if to_gpu:
            device = get_current_device()
            batch = map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
        self.batch_size = _size_of(batch)
        return batch

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Results:
        """Run the next batch; a subclass does it, also by the older name ``forward_back_step``.

        Args:
            engine: Its model, criterion and `Engine.backward`.
            data_iter: Yields batches.
            forward_only: Run no backward pass.
            return_loss: Return the loss.
            return_output_label: Return outputs and labels.

        Returns:
            Output, label and loss; None for what was not asked for.

        Raises:
            NotImplementedError: The subclass does not override it.
        """
        older: Callable[..., Results] | None = getattr(self, "forward_back_step", None)
        if older is None:
            raise NotImplementedError(f"{type(self).__name__} overrides forward_backward_step(engine, data_iter, ...).")
        return older(engine, data_iter, forward_only, return_loss, return_output_label)


@SCHEDULE.register_module
class NonPipelineSchedule(BaseSchedule):
    """Calls the model with a batch, the criterion with outputs and labels, and runs the backward pass.

    Data that is a tuple becomes several arguments, and a mapping keywords.

    Args:
        data_process_func: Makes data and label of a batch; ``data, label = batch`` by default, or of a mapping its
            entry ``label`` and all others.

    Example:
        >>> import torch
        >>> from colossal.legacy.engine import Engine, NonPipelineSchedule
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = NonPipelineSchedule(lambda x: (x, x[:, :1]))
        >>> engine = Engine(model, optimizer, torch.nn.MSELoss(), schedule=schedule)
        >>> output, label, loss = engine.execute_schedule(iter([torch.ones(3, 2)]))
        >>> output.shape == label.shape, loss.requires_grad
        (True, False)
    """

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> Results:
        """Run the next batch.

        Args:
            engine: Its model, criterion and `Engine.backward`.
            data_iter: Yields batches.
            forward_only: Run no backward pass.
            return_loss: Return the loss.
            return_output_label: Return outputs and labels.

        Returns:
            Output, label and loss; None for what was not asked for.

        Raises:
            ConfigError: There is a backward pass and no loss.
            StopIteration: There is no batch left.
        """
        check_loss(forward_only, return_loss)
        batch = self.load_batch(data_iter)
        data, label = split_batch(batch) if self.data_process_func is None else self.data_process_func(batch)
        args, kwargs = as_arguments(data)
        output = engine(*args, **kwargs)
        loss = compute_loss(engine.criterion, output, label) if return_loss else None
        if loss is not None and not forward_only:
            engine.backward(loss)
        loss = None if loss is None else loss.detach()
        return (output, label, loss) if return_output_label else (None, None, loss)


def compute_loss(criterion: Callable[..., Any] | None, outputs: Any, label: Any) -> torch.Tensor:
    """Call a criterion with outputs and label: tuples become several arguments, and a mapping of labels keywords."""
    if criterion is None:
        raise ConfigError("A schedule computes the loss by the criterion. Found none. Pass criterion to initialize.")
    args = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    if isinstance(label, Mapping):
        return criterion(*args, **cast("Mapping[str, Any]", label))
    if label is not None:
        args += list(cast("Sequence[Any]", label)) if isinstance(label, (tuple, list)) else [label]
    return criterion(*args)


def check_loss(forward_only: bool, return_loss: bool) -> None:
    """Raise where a backward pass has no loss, or no graph to run through."""
    if not forward_only and not torch.is_grad_enabled():
        raise ConfigError(
            "A training pass needs gradients. Found execute_schedule(data_iter) inside of torch.no_grad(). Pass "
            "forward_only=True to evaluate, or leave the context."
        )
    if not forward_only and not return_loss:
        raise ConfigError(
            "A backward pass needs the loss. Found return_loss=False and forward_only=False. Pass forward_only=True, "
            "or leave return_loss out."
        )


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Data and label of a batch."""
    if isinstance(batch, Mapping):
        named = dict(cast("Mapping[str, Any]", batch))
        label = named.pop(_LABEL, None)
        return named, label
    if not isinstance(batch, (tuple, list)) or len(cast("Sequence[Any]", batch)) != _DATA_AND_LABEL:
        raise ConfigError(
            f"A batch is data and label, or a mapping with the entry {_LABEL!r}. Found a {type(batch).__name__}. Pass "
            "data_process_func to the schedule, which returns data and label."
        )
    data, label = cast("Sequence[Any]", batch)
    return data, label


def as_arguments(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a model: of a tuple several, of a mapping keywords."""
    if isinstance(data, Mapping):
        return (), dict(cast("Mapping[str, Any]", data))
    return (tuple(cast("Sequence[Any]", data)), {}) if isinstance(data, (tuple, list)) else ((data,), {})


def _size_of(batch: Any) -> int:
    """The number of samples of the first tensor in a batch that has any dimension: a number has none for samples."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim():
            sizes.append(len(tensor))
        return tensor

    map_tensors(batch, note)
    return sizes[0] if sizes else 0
