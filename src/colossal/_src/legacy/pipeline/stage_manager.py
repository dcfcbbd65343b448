"""The position of a rank in a pipeline along an axis of a `ProcessGroupMesh`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh
from colossal._src.legacy.mesh import ProcessGroupMesh, RankGrid
from colossal._src.legacy.notice import superseded
from colossal._src.pipeline import StagePlacement, partition_uniform
from colossal.errors import ConfigError


@final
class GridStageManager:
    """Says which stage of a pipeline this rank has, and who is before and after it.

    Superseded by ``HybridParallelPlugin.stage_manager``.

    Args:
        pg_mesh: The ranks.
        pipeline_axis: The axis of the mesh along which the stages are.
        enable_interleave: Whether a rank has several chunks of the model.
        use_zbv: Whether stages go back from the last rank to the first, in a V.
        num_model_chunks: Chunks of the model on each rank.
        num_layers_per_stage: Layers of each stage, for `distribute_layers`; even by default.

    Attributes:
        is_interleave: Whether a rank has several chunks, as was passed.
        model_chunk_id: The chunk that is asked about, None for all of this rank: see `switch_model_chunk_id`.
        placement: Which rank has which stage.

    Raises:
        ConfigError: The numbers of chunks do not fit the other options.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.legacy.pipeline import GridStageManager
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=3):
        ...     manager = GridStageManager(ProcessGroupMesh(2, 2), pipeline_axis=1)
        ...     manager.stage, manager.num_stages, manager.is_last_stage(), manager.get_prev_rank()
        (1, 2, True, 2)
    """

    def __init__(
        self,
        pg_mesh: ProcessGroupMesh,
        pipeline_axis: int,
        enable_interleave: bool = False,
        use_zbv: bool = False,
        num_model_chunks: int = 1,
        num_layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        superseded("colossal.pipeline.stage_manager.PipelineStageManager", "HybridParallelPlugin(...).stage_manager")
        if num_model_chunks < 1 or (num_model_chunks > 1 and not (enable_interleave or use_zbv)):
            raise ConfigError(
                "A rank has one chunk of the model, or with enable_interleave=True or use_zbv=True several. Found "
                f"num_model_chunks={num_model_chunks}, enable_interleave={enable_interleave}, use_zbv={use_zbv}. "
                "Turn one of them on, or leave num_model_chunks out."
            )
        self.pg_mesh, self.pipeline_axis = pg_mesh, pipeline_axis
        self.is_interleave, self.use_zbv, self.num_model_chunks = enable_interleave, use_zbv, num_model_chunks
        self.num_layers_per_stage = None if num_layers_per_stage is None else list(num_layers_per_stage)
        self.model_chunk_id: int | None = None
        self._group = pg_mesh.get_group_along_axis(pipeline_axis)
        self._ranks = pg_mesh.get_ranks_in_group(self._group)
        self.placement = StagePlacement(len(self._ranks), num_model_chunks, is_v=use_zbv)

    @property
    def num_stages(self) -> int:
        """Number of ranks along the axis."""
        return len(self._ranks)

    @property
    def stage(self) -> int:
        """Index of this rank along the axis."""
        return self._ranks.index(self.pg_mesh.rank)

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank has the first stage of the model.

        Args:
            ignore_chunk: Ask about all chunks of the rank, not the one that was switched to.

        Returns:
            True on the rank, or in the chunk, that takes the inputs.
        """
        return self._has(0, ignore_chunk)

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank has the last stage of the model; in a V that is the first rank.

        Args:
            ignore_chunk: Ask about all chunks of the rank, not the one that was switched to.

        Returns:
            True on the rank, or in the chunk, that returns the outputs.
        """
        return self._has(self.placement.num_stages - 1, ignore_chunk)

    def get_rank(self) -> int:
        """Return the global rank of this process.

        Returns:
            The rank.
        """
        return self.pg_mesh.rank

    def get_prev_rank(self) -> int:
        """Find the rank before this one.

        Returns:
            Its global rank; for the first, the last.
        """
        return self._ranks[self.stage - 1]

    def get_next_rank(self) -> int:
        """Find the rank after this one.

        Returns:
            Its global rank; for the last, the first.
        """
        return self._ranks[(self.stage + 1) % self.num_stages]

    def get_ranks(self) -> list[int]:
        """List the ranks of this pipeline.

        Returns:
            Their global ranks, along the axis.
        """
        return list(self._ranks)

    def get_p2p_process_group(self, *_ranks: int) -> dist.ProcessGroup:
        """Return the group in which ranks of the pipeline send to each other.

        Args:
            *_ranks: Accepted for programs that name two ranks: all of them use one group.

        Returns:
            The group along the axis.
        """
        return self._group

    def init_process_group_by_stages(self, stages: Sequence[int]) -> dist.ProcessGroup:
        """Form a group of some of the ranks along the axis, such as those that tie parameters.

        Args:
            stages: Their indices.

        Returns:
            The group; on other ranks ``GroupMember.NON_GROUP_MEMBER``, as of `torch.distributed.new_group`.

        Communication: the ranks of the group open connections; all of them must call.
        """
        return self.pg_mesh.get_group_along_axis(self.pipeline_axis, list(stages))

    @contextmanager
    def switch_model_chunk_id(self, model_chunk_id: int) -> Iterator[None]:
        """Ask about one chunk of this rank until the context ends.

        Args:
            model_chunk_id: The index of the chunk.

        Yields:
            Nothing.

        Raises:
            ConfigError: There is no such chunk.
        """
        if not 0 <= model_chunk_id < self.num_model_chunks:
            raise ConfigError(
                f"A rank has {self.num_model_chunks} chunks of the model. Found chunk {model_chunk_id}. Count from 0."
            )
        outer, self.model_chunk_id = self.model_chunk_id, model_chunk_id
        try:
            yield
        finally:
            self.model_chunk_id = outer

    def distribute_layers(
        self, num_layers: int, num_stages: int | None = None, num_model_chunks: int | None = None
    ) -> list[int]:
        """Say how many layers each stage gets.

        Args:
            num_layers: Layers of the model.
            num_stages: Ranks of the pipeline; those of this one by default.
            num_model_chunks: Chunks of each; those of this one by default.

        Returns:
            The number for each stage, of all chunks.

        Raises:
            ConfigError: There are fewer layers than stages, or `num_layers_per_stage` was given and is something else.
        """
        number = (num_stages or self.num_stages) * (num_model_chunks or self.num_model_chunks)
        given = self.num_layers_per_stage
        if given is None:
            return [len(layers) for layers in partition_uniform(num_layers, number)]
        if sum(given) != num_layers or len(given) != number:
            raise ConfigError(
                f"num_layers_per_stage has a number for each of {number} stages, which add up to {num_layers} layers. "
                f"Found {given}. Change it."
            )
        return list(given)

    def get_stage_index(
        self,
        layers_per_stage: Sequence[int],
        stage: int | None = None,
        num_model_chunks: int | None = None,
        num_stages: int | None = None,
    ) -> Any:
        """Find the layers of a rank.

        Args:
            layers_per_stage: Layers of each stage, as of `distribute_layers`.
            stage: The index of the rank; this one's by default.
            num_model_chunks: Chunks of each rank; those of this pipeline by default.
            num_stages: Ranks of the pipeline; those of this one by default.

        Returns:
            The first layer and the one after the last; of several chunks a list of such pairs.
        """
        placement = StagePlacement(
            num_stages or self.num_stages, num_model_chunks or self.num_model_chunks, is_v=self.use_zbv
        )
        own = placement.stages_of(self.stage if stage is None else stage)
        bounds = [[sum(layers_per_stage[:each]), sum(layers_per_stage[: each + 1])] for each in own]
        return bounds if self.is_interleave or placement.num_chunks > 1 else bounds[0]

    def as_mesh(self) -> ParallelMesh:
        """Return a mesh whose pp axis is the axis of the pipeline.

        Returns:
            What an executor asks for: its pp axis, and nothing of the others.
        """
        shape = self.pg_mesh.shape
        ranks = torch.arange(torch.Size(shape).numel(), device="cpu")
        grid = RankGrid(ranks.reshape(shape).movedim(self.pipeline_axis, 0).reshape(self.num_stages, -1, 1))
        grid.set_group("pp", self._group)
        return grid.as_mesh()

    def _has(self, stage: int, ignore_chunk: bool) -> bool:
        own = self.placement.stages_of(self.stage)
        return stage in own if ignore_chunk or self.model_chunk_id is None else own[self.model_chunk_id] == stage
