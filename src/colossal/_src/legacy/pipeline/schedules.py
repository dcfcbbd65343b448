"""Schedules of a pipeline that a program runs itself, without a plugin."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from colossal._src.interface import ModelWrapper, OptimizerWrapper
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.pipeline.packing import pack, unpack
from colossal._src.legacy.pipeline.stage_manager import GridStageManager
from colossal._src.legacy.pipeline.v_schedule import ScheduledNode
from colossal._src.pipeline import GivenSchedule, Microbatching, PipelineExecutor, PipelineStyle, Stage
from colossal.errors import ConfigError, UnsupportedError

_V_CHUNKS = 2


class StageSchedule:
    """Runs batches through the stages of a pipeline; use one of its subclasses.

    The first stage is called with the micro-batch, any other one with the micro-batch and, as keywords, with the dict
    that the stage before has returned: ``forward(data, hidden=None)``. The last one returns the outputs.

    Args:
        stage_manager: The position of this rank.

    Example:
        >>> from colossal.legacy.pipeline import OneForwardOneBackwardSchedule, StageSchedule
        >>> issubclass(OneForwardOneBackwardSchedule, StageSchedule)
        True
    """

    _style: PipelineStyle = "1f1b"

    def __init__(self, stage_manager: GridStageManager) -> None:
        self.stage_manager = stage_manager
        self._placement = stage_manager.placement
        self._microbatching: Microbatching | None = None
        self._caches = True
        self._schedule: GivenSchedule | None = None
        self._run: tuple[list[nn.Module], PipelineExecutor] | None = None

    def forward_backward_step(
        self,
        model: nn.Module | Sequence[nn.Module],
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | torch.optim.Optimizer | None = None,
        return_loss: bool = False,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the next batch: forward, and backward if there is an optimizer and gradients are enabled.

        Args:
            model: The stage of this rank; a list of its chunks.
            data_iter: Batches, the same on all ranks of the pipeline.
            criterion: Makes the loss of a micro-batch from the outputs and the micro-batch.
            optimizer: What goes backward; None to evaluate.
            return_loss: Return the loss, the mean over micro-batches, on all ranks.
            return_outputs: Return the outputs, on the rank of the last stage.

        Returns:
            ``loss`` and ``outputs``, each None if it was not asked for.

        Raises:
            ConfigError: The number of chunks is another one, or a stage returns no dict.

        Communication: that of `colossal.booster.Booster.execute_pipeline`.
        """
        superseded(f"{type(self).__name__}.forward_backward_step", "booster.execute_pipeline(...)")
        run = self._executor(_chunks_of(model, self._placement.num_chunks))
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = OptimizerWrapper(optimizer)
        return run(data_iter, criterion, optimizer, return_loss, return_outputs)

    def _executor(self, chunks: list[nn.Module]) -> PipelineExecutor:
        """Return what runs some modules, which is made once for them."""
        if self._run is None or [*map(id, self._run[0])] != [*map(id, chunks)]:
            if self._microbatching is None or len(chunks) != self._placement.num_chunks:
                raise ConfigError(
                    f"A rank of this pipeline has {self._placement.num_chunks} chunks of the model, and a subclass of "
                    f"StageSchedule runs them. Found {len(chunks)} modules on {type(self).__name__}. Pass a module "
                    "for each chunk."
                )
            self._run = (chunks, self._make_executor(chunks, self._microbatching))
        return self._run[1]

    def _make_executor(self, chunks: list[nn.Module], microbatching: Microbatching) -> PipelineExecutor:
        manager, number = self.stage_manager, self._placement.num_stages
        own = self._placement.stages_of(manager.stage)
        stages = [
            Stage(
                _ChunkModule(chunk, manager, index, is_last=stage == number - 1),
                stage,
                number,
                arguments=lambda carry, inputs: ((carry, inputs), {}),
            )
            for index, (chunk, stage) in enumerate(zip(chunks, own, strict=True))
        ]
        return PipelineExecutor(
            stages,
            self._placement,
            manager.as_mesh(),
            self._style,
            microbatching,
            self._caches,
            given_schedule=self._schedule,
        )


class OneForwardOneBackwardSchedule(StageSchedule):
    """Goes backward with each micro-batch as soon as that is possible.

    Superseded by ``HybridParallelPlugin(pp_style="1f1b")``.

    Args:
        stage_manager: The position of this rank.
        num_microbatches: Micro-batches of a batch.
        microbatch_size: Samples of a micro-batch, instead of their number.
        enable_metadata_cache: Send the shapes between stages with the first batch only.
        fp8_communication: Not supported.

    Raises:
        ConfigError: Not one of the two numbers was given, or a rank has several chunks.
        UnsupportedError: `fp8_communication` is set.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.legacy.pipeline import OneForwardOneBackwardSchedule, GridStageManager
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     manager = GridStageManager(ProcessGroupMesh(1, 2), pipeline_axis=1)
        ...     schedule = OneForwardOneBackwardSchedule(manager, num_microbatches=4)
        >>> schedule.stage_manager.num_stages
        2
    """

    def __init__(
        self,
        stage_manager: GridStageManager,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        enable_metadata_cache: bool = True,
        fp8_communication: bool = False,
    ) -> None:
        super().__init__(stage_manager)
        _refuse_unsupported(fp8_communication, overlap_p2p=True)
        if stage_manager.num_model_chunks != 1:
            raise ConfigError(
                f"1F1B has one stage on each rank. Found num_model_chunks={stage_manager.num_model_chunks}. Use "
                "InterleavedSchedule, or one chunk."
            )
        self._microbatching = Microbatching(num_microbatches, microbatch_size)
        self._caches = enable_metadata_cache


class _ChunkSchedule(StageSchedule):
    """A schedule of several chunks on each rank, whose first argument has another documented name."""

    def forward_backward_step(  # pyright: ignore[reportIncompatibleMethodOverride] (the documented name)
        self,
        model_chunk: nn.Module | Sequence[nn.Module],
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | torch.optim.Optimizer | None = None,
        return_loss: bool = False,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the next batch; see `StageSchedule.forward_backward_step`.

        Args:
            model_chunk: The chunks of this rank, in a list.
            data_iter: As there.
            criterion: As there.
            optimizer: As there.
            return_loss: As there.
            return_outputs: As there.

        Returns:
            As there.
        """
        return super().forward_backward_step(model_chunk, data_iter, criterion, optimizer, return_loss, return_outputs)


class InterleavedSchedule(_ChunkSchedule):
    """Lets each rank have several chunks of the model, so that it waits less.

    Superseded by ``HybridParallelPlugin(pp_style="interleaved")``.

    Args:
        stage_manager: The position of this rank.
        num_model_chunks: Chunks of each rank.
        num_microbatch: Micro-batches of a batch, divisible by the number of ranks.
        microbatch_size: Samples of a micro-batch, instead of their number.
        enable_metadata_cache: Send the shapes between stages with the first batch only.
        overlap_p2p: Messages always overlap with passes: True.
        fp8_communication: Not supported.

    Raises:
        ConfigError: Not one of the two numbers was given, or the manager has another number of chunks.
        UnsupportedError: `fp8_communication` is set, or `overlap_p2p` is not.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.legacy.pipeline import InterleavedSchedule, GridStageManager
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     manager = GridStageManager(ProcessGroupMesh(2), 0, enable_interleave=True, num_model_chunks=2)
        ...     schedule = InterleavedSchedule(manager, num_model_chunks=2, num_microbatch=4)
        >>> schedule.stage_manager.num_model_chunks
        2
    """

    _style: PipelineStyle = "interleaved"

    def __init__(
        self,
        stage_manager: GridStageManager,
        num_model_chunks: int,
        num_microbatch: int | None = None,
        microbatch_size: int | None = None,
        enable_metadata_cache: bool = True,
        overlap_p2p: bool = True,
        fp8_communication: bool = False,
    ) -> None:
        super().__init__(stage_manager)
        _refuse_unsupported(fp8_communication, overlap_p2p)
        if stage_manager.num_model_chunks != num_model_chunks or stage_manager.use_zbv:
            raise ConfigError(
                "The stage manager and its schedule agree on the chunks of a rank. Found num_model_chunks="
                f"{num_model_chunks}, and {stage_manager.num_model_chunks} chunks with use_zbv={stage_manager.use_zbv} "
                "of the manager. Make GridStageManager(..., enable_interleave=True, num_model_chunks="
                f"{num_model_chunks})."
            )
        self._microbatching = Microbatching(num_microbatch, microbatch_size)
        self._caches = enable_metadata_cache


class ZeroBubbleVPipeScheduler(_ChunkSchedule):
    """Fills the bubble with gradients of weights, in the order of a `PipelineGraph`.

    Superseded by ``HybridParallelPlugin(pp_style="zbv")``, which computes the order itself.

    Args:
        stage_manager: The position of this rank, with ``use_zbv=True`` and two chunks.
        schedule: What each rank does, in its order: of `PipelineGraph.get_v_schedule`, or the program's own.
        num_model_chunks: Chunks of each rank: 2.
        num_microbatch: Micro-batches of a batch, those of the schedule.
        microbatch_size: Samples of a micro-batch, instead of their number, which the batch then decides.
        enable_metadata_cache: Send the shapes between stages with the first batch only.
        overlap_p2p: Messages always overlap with passes: True.

    Raises:
        ConfigError: The schedule does not end, is not complete or has another number, or the manager is another one.
        UnsupportedError: `overlap_p2p` is not set.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.legacy.pipeline import PipelineGraph, GridStageManager, ZeroBubbleVPipeScheduler
        >>> from colossal.testing import fake_world
        >>> nodes = PipelineGraph(2, 4, 1, 1, 1, 0, 2, -1, -1).get_v_schedule()
        >>> with fake_world(2):
        ...     manager = GridStageManager(ProcessGroupMesh(2), 0, use_zbv=True, num_model_chunks=2)
        ...     schedule = ZeroBubbleVPipeScheduler(manager, nodes, num_model_chunks=2, num_microbatch=4)
        >>> schedule.stage_manager.use_zbv
        True
    """

    _style: PipelineStyle = "zbv"

    def __init__(
        self,
        stage_manager: GridStageManager,
        schedule: Sequence[Sequence[ScheduledNode]],
        num_model_chunks: int,
        num_microbatch: int | None = None,
        microbatch_size: int | None = None,
        enable_metadata_cache: bool = True,
        overlap_p2p: bool = True,
    ) -> None:
        super().__init__(stage_manager)
        _refuse_unsupported(False, overlap_p2p)
        if not stage_manager.use_zbv or {num_model_chunks, stage_manager.num_model_chunks} != {_V_CHUNKS}:
            raise ConfigError(
                f"In a V each rank has {_V_CHUNKS} chunks of the model. Found num_model_chunks={num_model_chunks}, and "
                f"{stage_manager.num_model_chunks} with use_zbv={stage_manager.use_zbv} of the stage manager. Make "
                "GridStageManager(..., use_zbv=True, num_model_chunks=2)."
            )
        self._microbatching = Microbatching(num_microbatch, microbatch_size)
        self._caches = enable_metadata_cache
        self._schedule = GivenSchedule.of_nodes(schedule, self._placement)
        self._schedule.check_number(num_microbatch)


class _ChunkModule(nn.Module):
    """A chunk of a program's model, which gets keywords and returns a dict of them."""

    def __init__(self, module: nn.Module, manager: GridStageManager, chunk: int, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self._manager, self._chunk, self._is_last = manager, chunk, is_last

    def forward(self, carry: torch.Tensor | tuple[torch.Tensor, ...] | None, inputs: Any) -> Any:
        received: dict[str, Any] = {}
        if carry is not None:
            received = unpack((carry,) if isinstance(carry, torch.Tensor) else carry)
        with self._manager.switch_model_chunk_id(self._chunk):
            if isinstance(inputs, Mapping):
                outputs = self.module(**cast("Mapping[str, Any]", inputs), **received)
            else:
                args = cast("Sequence[Any]", inputs) if isinstance(inputs, list | tuple) else (inputs,)
                outputs = self.module(*args, **received)
        if self._is_last:
            return outputs
        if not isinstance(outputs, Mapping):
            raise ConfigError(
                "Every stage but the last returns a dict: the keywords of the next one. Found that "
                f"{type(self.module).__name__} returns {type(outputs).__name__}. Return dict(name=tensor)."
            )
        return pack(outputs)


def _chunks_of(model: nn.Module | Sequence[nn.Module], num_chunks: int) -> list[nn.Module]:
    inner = model.module if isinstance(model, ModelWrapper) and isinstance(model.module, nn.ModuleList) else model
    if isinstance(inner, nn.ModuleList) and num_chunks == 1:
        # a list that was given a forward method of its own is one stage
        is_stage = "forward" in vars(inner) or type(inner).forward is not nn.Module.forward
        return [inner] if is_stage else [*inner]
    return [inner] if isinstance(inner, nn.Module) and not isinstance(inner, nn.ModuleList) else [*inner]


def _refuse_unsupported(fp8_communication: bool, overlap_p2p: bool) -> None:
    if fp8_communication or not overlap_p2p:
        raise UnsupportedError(
            "Stages send hidden states in their own dtype, while ranks go on working. Found fp8_communication="
            f"{fp8_communication}, overlap_p2p={overlap_p2p}. Leave both out."
        )
