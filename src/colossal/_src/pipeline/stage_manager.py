"""Where a rank is in a pipeline."""

from dataclasses import dataclass
from typing import final

from colossal._src.cluster import ParallelMesh
from colossal._src.pipeline.partition import partition_uniform
from colossal._src.pipeline.schedule.stage_placement import StagePlacement


@final
@dataclass(frozen=True)
class PipelineStageManager:
    """The position of a rank in a pipeline, as ``HybridParallelPlugin.stage_manager``.

    Args:
        mesh: The mesh.
        placement: Which rank has which stage.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.pipeline import PipelineStageManager, StagePlacement
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=3):
        ...     manager = PipelineStageManager(ParallelMesh(pp=4), StagePlacement(4))
        ...     print(manager.stage, manager.is_first_stage(), manager.is_last_stage(), manager.get_prev_rank())
        3 False True 2
    """

    mesh: ParallelMesh
    placement: StagePlacement

    @property
    def stage(self) -> int:
        """Index of this rank on the pp axis."""
        return self.mesh.rank("pp")

    @property
    def num_stages(self) -> int:
        """Number of ranks of the pp axis."""
        return self.mesh.size("pp")

    @property
    def num_model_chunks(self) -> int:
        """Number of stages that each rank has."""
        return len(self.placement.stages_of(self.stage))

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:  # noqa: ARG002 (a rank knows of all its chunks)
        """Whether this rank has the first stage of the model, the one that takes the inputs.

        Args:
            ignore_chunk: Accepted for programs that pass it: the answer is about all stages of the rank.

        Returns:
            True for the rank of the first stage.
        """
        return self.placement.rank_of(0) == self.stage

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:  # noqa: ARG002
        """Whether this rank has the last stage of the model, the one that returns outputs.

        Args:
            ignore_chunk: Accepted for programs that pass it: the answer is about all stages of the rank.

        Returns:
            True for the rank of the last stage.
        """
        return self.placement.rank_of(self.placement.num_stages - 1) == self.stage

    def get_rank(self) -> int:
        """Return the global rank of this process.

        Returns:
            Its global rank.
        """
        return self.mesh.global_rank

    def get_prev_rank(self) -> int:
        """Find the rank of the stages before.

        Returns:
            The global rank before this one on the pp axis; for the first one, the last.
        """
        return self.mesh.ranks("pp")[self.stage - 1]

    def get_next_rank(self) -> int:
        """Find the rank of the stages after.

        Returns:
            The global rank after this one on the pp axis; for the last one, the first.
        """
        return self.mesh.ranks("pp")[(self.stage + 1) % self.num_stages]

    def distribute_layers(self, num_layers: int) -> list[int]:
        """Say how many layers each stage gets by default.

        Args:
            num_layers: Layers of the model.

        Returns:
            The number for each stage, of all ranks, in the order of the stages.

        Raises:
            ConfigError: There are fewer layers than stages.
        """
        return [len(layers) for layers in partition_uniform(num_layers, self.placement.num_stages)]
