"""Which layers each stage of a pipeline has, and what users' models ask about their stage."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from colossal._src.cluster import ParallelMesh
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
from colossal.errors import ConfigError


def partition_uniform(num_layers: int, num_stages: int) -> list[range]:
    """Give every stage as many layers as any other, or one more.

    The layers that are left over go to stages in the middle: the first and the last also have embeddings and heads.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages of the pipeline.

    Returns:
        The layers of each stage.

    Raises:
        ConfigError: There are more stages than layers.

    Example:
        >>> from colossal.pipeline import partition_uniform
        >>> partition_uniform(9, 4)
        [range(0, 2), range(2, 4), range(4, 7), range(7, 9)]
    """
    _check(num_layers, num_stages)
    each, left = divmod(num_layers, num_stages)
    first = (num_stages - left + 1) // 2
    return partition_by_counts([each + (first <= stage < first + left) for stage in range(num_stages)])


def partition_balanced(weights: Sequence[float], num_stages: int) -> list[range]:
    """Partition layers so that the heaviest stage is as light as possible.

    Args:
        weights: What each layer weighs, in any unit: parameters, bytes or measured seconds.
        num_stages: Stages of the pipeline.

    Returns:
        The layers of each stage; contiguous ranges, and every stage has at least one.

    Raises:
        ConfigError: There are more stages than layers, or a weight is negative.

    Example:
        >>> from colossal.pipeline import partition_balanced
        >>> partition_balanced([4.0, 1.0, 1.0, 2.0], num_stages=2)
        [range(0, 1), range(1, 4)]
    """
    _check(len(weights), num_stages)
    if any(weight < 0 for weight in weights):
        raise ConfigError(
            f"Weights of layers are at least 0. Found {min(weights)}. Pass parameters, bytes or seconds of each layer."
        )
    sums = [0.0, *accumulate(weights)]
    heaviest = {0: (0.0, (0,))}
    for stage in range(num_stages):
        # Each later stage needs a layer too.
        last = len(weights) - (num_stages - stage - 1)
        heaviest = {
            end: min(
                # Of equally light partitions the smallest bounds win, so that all ranks choose the same.
                (max(weight, sums[end] - sums[bounds[-1]]), (*bounds, end))
                for begin, (weight, bounds) in heaviest.items()
                if begin < end
            )
            for end in range(stage + 1, last + 1)
        }
    _, bounds = heaviest[len(weights)]
    return [range(*pair) for pair in pairwise(bounds)]


def partition_by_counts(counts: Sequence[int], num_layers: int | None = None) -> list[range]:
    """Give each stage the number of layers that the caller chose."""
    if min(counts) < 1 or num_layers not in (None, sum(counts)):
        layers = sum(counts) if num_layers is None else num_layers
        raise ConfigError(
            "Each stage of a pipeline has a layer at least, and together they have the layers of the model. Found "
            f"{list(counts)} for {layers} layers. Pass numbers of at least 1 that add up to {layers}."
        )
    return [range(*pair) for pair in pairwise([0, *accumulate(counts)])]


def stage_of_layer(layers: Sequence[range], layer: int) -> int:
    """Find the stage that has a layer."""
    return bisect_right([each.start for each in layers], layer) - 1


def _check(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"Each stage of a pipeline has a layer at least. Found {num_layers} layers for {num_stages} stages. Use "
            f"at most {num_layers} stages, or fewer chunks of the model on each rank."
        )


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
    def use_zbv(self) -> bool:
        """Whether stages go back from the last rank to the first, in a V."""
        return self.placement.is_v

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
