"""How a batch goes through the model of an engine: at once, or as micro-batches through the stages of a pipeline."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from colossal._src.legacy.registry import SCHEDULE
from colossal._src.legacy.utils import is_no_pp_or_last_stage
from colossal._src.legacy.utils.parallel_state import axis_size
from colossal._src.pipeline import map_tensors, merge_outputs
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError

Results = tuple[Any, Any, torch.Tensor | None]
"""Output, label and loss; None for what a rank does not have, or was not asked for."""

_STAGE_OUTPUT, _LABEL = "stage_output", "label"
_WITH_STAGE_OUTPUT = 2


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
        _check_loss(forward_only, return_loss)
        batch = self.load_batch(data_iter)
        data, label = _split(batch) if self.data_process_func is None else self.data_process_func(batch)
        args, kwargs = _as_arguments(data)
        output = engine(*args, **kwargs)
        loss = compute_loss(engine.criterion, output, label) if return_loss else None
        if loss is not None and not forward_only:
            engine.backward(loss)
        loss = None if loss is None else loss.detach()
        return (output, label, loss) if return_output_label else (None, None, loss)


@SCHEDULE.register_module
class PipelineSchedule(BaseSchedule):
    """Sends micro-batches through the stages of a pipeline, one forward and one backward in turn (1F1B).

    The first stage is called with the data; any other with the output of the one before. Where the batch is a mapping,
    all stages get its entries but ``label`` as keywords too. The loss is there on all ranks, outputs and labels on
    those of the last stage.

    Args:
        num_microbatches: Number of micro-batches of a batch; that of the config's ``NUM_MICRO_BATCHES``.
        data_process_func: Makes data and label of a micro-batch, ``data_process_func(stage_output, batch)``, or with
            one parameter of the batch alone.
        tensor_shape: Accepted as documented: the shape between stages is sent once, with the first batch.
        scatter_gather_tensors: Accepted as documented: ranks of a stage send what the next stage needs.

    Attributes:
        num_microbatches: As passed.

    Raises:
        ConfigError: There is less than one micro-batch.

    Example:
        >>> from colossal.legacy.engine import PipelineSchedule
        >>> PipelineSchedule(num_microbatches=4).num_microbatches
        4
    """

    def __init__(
        self,
        num_microbatches: int,
        data_process_func: Callable[..., Any] | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(data_process_func)
        if not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise ConfigError(
                f"A batch becomes at least one micro-batch. Found num_microbatches={num_microbatches!r}. Pass a number "
                "that divides the batch."
            )
        del tensor_shape, scatter_gather_tensors
        self.num_microbatches = num_microbatches
        self._labels: dict[int, Any] = {}  # by the micro-batch that the last stage works on
        self._takes_stage_output = (
            data_process_func is not None and len(inspect.signature(data_process_func).parameters) == _WITH_STAGE_OUTPUT
        )

    def pre_processing(self, engine: Any) -> None:
        """Make sure that the model of an engine runs as this schedule says.

        Args:
            engine: The engine.

        Raises:
            ConfigError: Its model is not in stages, or the config has another number of micro-batches or chunks.
        """
        engine.check_pipeline(self.num_microbatches, 1)

    def stage_arguments(self, stage_output: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the arguments of a stage.

        Args:
            stage_output: What the previous stage returned; None on the first.
            batch: The micro-batch.

        Returns:
            Positional arguments and keywords.
        """
        data, self._labels[id(batch)] = self._split(stage_output, batch)
        if not isinstance(data, Mapping) or _STAGE_OUTPUT not in data:
            return _as_arguments(data)
        keywords = {name: value for name, value in cast("Mapping[str, Any]", data).items() if name != _STAGE_OUTPUT}
        received = cast("Mapping[str, Any]", data)[_STAGE_OUTPUT]
        return ((), keywords) if received is None else (_as_arguments(received)[0], keywords)

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
            engine: Of a model in stages.
            data_iter: Yields batches, the same on all ranks of the pipeline.
            forward_only: Run no backward pass.
            return_loss: Return the loss.
            return_output_label: Return outputs and labels, on the last stage.

        Returns:
            Output, label and loss; None for what this rank does not have, or was not asked for.

        Raises:
            ConfigError: There is a backward pass and no loss, or the batch does not divide.
            StopIteration: There is no batch left.
        """
        _check_loss(forward_only, return_loss)
        labels: list[Any] = []

        def criterion(outputs: Any, batch: Any) -> torch.Tensor:
            label = self._labels.pop(id(batch)) if id(batch) in self._labels else self._split(outputs, batch)[1]
            labels.append(label)
            if not return_loss:
                return torch.zeros((), device=get_current_device())
            return compute_loss(engine.criterion, outputs, label)

        self._labels.clear()
        batch = self.load_batch(data_iter)
        try:
            done = engine.run_pipeline(iter([batch]), criterion, forward_only, return_loss, return_output_label)
        finally:
            self._labels.clear()
        if not return_output_label or not is_no_pp_or_last_stage():
            return None, None, done["loss"]
        has_labels = any(label is not None for label in labels)
        return done["outputs"], merge_outputs(labels) if has_labels else None, done["loss"]

    def _split(self, stage_output: Any, batch: Any) -> tuple[Any, Any]:
        if self._takes_stage_output:
            assert self.data_process_func is not None
            return self.data_process_func(stage_output, batch)
        if self.data_process_func is not None:
            data, label = self.data_process_func(batch)
        else:
            data, label = _split(batch)
        if isinstance(data, Mapping):
            return {**cast("Mapping[str, Any]", data), _STAGE_OUTPUT: stage_output}, label
        return (data if stage_output is None else stage_output), label


@SCHEDULE.register_module
class InterleavedPipelineSchedule(PipelineSchedule):
    """Sends micro-batches through a pipeline whose ranks have several chunks of the model each.

    Args:
        num_microbatches: Number of micro-batches of a batch: a multiple of the number of ranks of the pipeline.
        num_model_chunks: Number of chunks of each rank; that of the config's ``NUM_CHUNKS``.
        data_process_func: As of `PipelineSchedule`.
        tensor_shape: Accepted as documented.
        scatter_gather_tensors: Accepted as documented.

    Attributes:
        num_model_chunks: As passed.

    Raises:
        ConfigError: The ranks of the pipeline do not divide the micro-batches, or there is no chunk.

    Example:
        >>> from colossal.legacy.engine import InterleavedPipelineSchedule
        >>> InterleavedPipelineSchedule(num_microbatches=4, num_model_chunks=2).num_model_chunks
        2
    """

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        data_process_func: Callable[..., Any] | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
    ) -> None:
        super().__init__(num_microbatches, data_process_func, tensor_shape, scatter_gather_tensors)
        if num_microbatches % axis_size("pp") or num_model_chunks < 1:
            raise ConfigError(
                "Interleaved stages take a number of micro-batches that the ranks of the pipeline divide, and one "
                f"chunk or more. Found num_microbatches={num_microbatches} for {axis_size('pp')} ranks, and "
                f"num_model_chunks={num_model_chunks}. Change NUM_MICRO_BATCHES or NUM_CHUNKS."
            )
        self.num_model_chunks = num_model_chunks

    def pre_processing(self, engine: Any) -> None:
        """Make sure that the model of an engine runs as this schedule says.

        Args:
            engine: The engine.

        Raises:
            ConfigError: Its model is not in stages, or the config has another number of micro-batches or chunks.
        """
        engine.check_pipeline(self.num_microbatches, self.num_model_chunks)


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


def _check_loss(forward_only: bool, return_loss: bool) -> None:
    if not forward_only and not return_loss:
        raise ConfigError(
            "A backward pass needs the loss. Found return_loss=False and forward_only=False. Pass forward_only=True, "
            "or leave return_loss out."
        )


def _split(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        named = dict(cast("Mapping[str, Any]", batch))
        label = named.pop(_LABEL, None)
        return named, label
    if not isinstance(batch, (tuple, list)) or len(cast("Sequence[Any]", batch)) != _WITH_STAGE_OUTPUT:
        raise ConfigError(
            f"A batch is data and label, or a mapping with the entry {_LABEL!r}. Found a {type(batch).__name__}. Pass "
            "data_process_func to the schedule, which returns data and label."
        )
    data, label = cast("Sequence[Any]", batch)
    return data, label


def _as_arguments(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(data, Mapping):
        return (), dict(cast("Mapping[str, Any]", data))
    return (tuple(cast("Sequence[Any]", data)), {}) if isinstance(data, (tuple, list)) else ((data,), {})


def _size_of(batch: Any) -> int:
    """The number of samples of the first tensor in a batch."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tensor) if tensor.dim() else 1)
        return tensor

    map_tensors(batch, note)
    return sizes[0] if sizes else 0
