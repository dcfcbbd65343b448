"""Which rank has which stage of a pipeline."""

from dataclasses import dataclass
from typing import Literal, final

PipelineStyle = Literal["1f1b", "interleaved", "zbv"]
"""The order in which a rank works: see `colossal.pipeline.SCHEDULES`."""


@final
@dataclass(frozen=True)
class StagePlacement:
    """Which rank of the pp axis has which stage.

    With one chunk of the model on each rank, stage and rank are the same. With several, stages go round: after the last
    rank comes the first again; in a V they go back, so that the first rank has the first stage and the last.

    Args:
        num_ranks: Ranks of the pp axis.
        num_chunks: Chunks of the model that each rank has.
        is_v: Whether stages go back rather than round.

    Example:
        >>> from colossal.pipeline import StagePlacement
        >>> [StagePlacement(2, num_chunks=2, is_v=True).rank_of(stage) for stage in range(4)]
        [0, 1, 1, 0]
    """

    num_ranks: int
    num_chunks: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Find the rank that has a stage.

        Args:
            stage: The index of the stage.

        Returns:
            The index of the rank on the pp axis.
        """
        lap, rank = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - rank if self.is_v and lap % 2 else rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Find the stages that a rank has.

        Args:
            rank: The index of the rank on the pp axis.

        Returns:
            The indices of its stages, in order.
        """
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


@final
@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages have, such as an embedding tied to the head."""

    names: tuple[str, ...]  # its names in the full model, in the order of the stages
    stages: tuple[int, ...]  # the stage that has the name

    def ranks(self, placement: StagePlacement) -> tuple[int, ...]:
        """Find the ranks that have it."""
        return tuple(sorted({placement.rank_of(stage) for stage in self.stages}))
