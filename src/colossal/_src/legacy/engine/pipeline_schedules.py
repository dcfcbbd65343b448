"""How a batch goes through the stages of a pipeline as micro-batches."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from colossal._src.legacy.engine.schedules import (
    BaseSchedule,
    Results,
    as_arguments,
    check_loss,
    compute_loss,
    split_batch,
)
from colossal._src.legacy.registry import SCHEDULE
from colossal._src.legacy.utils import is_no_pp_or_last_stage
from colossal._src.legacy.utils.parallel_state import axis_size
from colossal._src.pipeline import merge_outputs
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError

_STAGE_OUTPUT = "stage_output"
_WITH_STAGE_OUTPUT = 2


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
            return as_arguments(data)
        keywords = {name: value for name, value in cast("Mapping[str, Any]", data).items() if name != _STAGE_OUTPUT}
        received = cast("Mapping[str, Any]", data)[_STAGE_OUTPUT]
        return ((), keywords) if received is None else (as_arguments(received)[0], keywords)

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
        check_loss(forward_only, return_loss)
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
            data, label = split_batch(batch)
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
