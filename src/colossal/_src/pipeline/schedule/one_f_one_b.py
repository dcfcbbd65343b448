"""Schedules that alternate forward and backward passes."""

from itertools import chain

from colossal._src.pipeline.schedule.action import Action, PipelineOrder
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
from colossal.errors import ConfigError


def one_forward_one_backward(placement: StagePlacement, num_microbatches: int) -> PipelineOrder:
    """Go backward with each micro-batch as soon as that is possible.

    A rank has at most as many micro-batches in flight as there are ranks from itself to the last (Narayanan et al.,
    "PipeDream", https://arxiv.org/abs/1806.03377; the flushed form of https://arxiv.org/abs/2104.04473).

    Args:
        placement: Which rank has which stage; one on each.
        num_microbatches: Micro-batches of a step.

    Returns:
        What each rank does.

    Raises:
        ConfigError: A rank has several stages.

    Example:
        >>> from colossal.pipeline import StagePlacement, one_forward_one_backward
        >>> one_forward_one_backward(StagePlacement(2), 2)[0]
        (F0.0, F0.1, B0.0, B0.1)
    """
    if placement.num_chunks != 1:
        raise ConfigError(
            f"1F1B has one stage on each rank. Found {placement.num_chunks} chunks of the model. Use the interleaved "
            "schedule, or one chunk."
        )
    return tuple(_alternate(stage, placement.num_ranks, num_microbatches) for stage in range(placement.num_ranks))


def _alternate(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    # One for each later stage: by then the first micro-batch has reached the last one, and can come back.
    num_ahead = min(num_stages - stage - 1, num_microbatches)
    forward = [Action("F", stage, index) for index in range(num_microbatches)]
    backward = [Action("B", stage, index) for index in range(num_microbatches)]
    steady = zip(forward[num_ahead:], backward, strict=False)
    return (*forward[:num_ahead], *chain.from_iterable(steady), *backward[num_microbatches - num_ahead :])


def interleaved(placement: StagePlacement, num_microbatches: int) -> PipelineOrder:
    """Let each rank have several stages, so that it waits less: the bubble is divided by their number.

    Micro-batches pass through the chunks of a rank in groups of as many as there are ranks (Narayanan et al.,
    https://arxiv.org/abs/2104.04473).

    Args:
        placement: Which rank has which stage.
        num_microbatches: Micro-batches of a step.

    Returns:
        What each rank does.

    Raises:
        ConfigError: The number of micro-batches is not divisible by the number of ranks.

    Example:
        >>> from colossal.pipeline import StagePlacement, interleaved
        >>> interleaved(StagePlacement(2, num_chunks=2), 2)[1]
        (F1.0, F1.1, F3.0, B3.0, F3.1, B3.1, B1.0, B1.1)
    """
    if num_microbatches % placement.num_ranks:
        raise ConfigError(
            "The interleaved schedule takes micro-batches in groups of as many as there are pipeline ranks. Found "
            f"{num_microbatches} micro-batches on {placement.num_ranks} ranks. Use a multiple of "
            f"{placement.num_ranks}, or pp_style='1f1b'."
        )
    return tuple(_interleave(rank, placement, num_microbatches) for rank in range(placement.num_ranks))


def _interleave(rank: int, placement: StagePlacement, num_microbatches: int) -> tuple[Action, ...]:
    size, chunks = placement.num_ranks, placement.num_chunks
    stages, total = placement.stages_of(rank), num_microbatches * chunks
    in_order = [
        (chunk, begin + index)
        for begin in range(0, num_microbatches, size)
        for chunk in range(chunks)
        for index in range(size)
    ]
    forward = [Action("F", stages[chunk], microbatch) for chunk, microbatch in in_order]
    backward = [Action("B", stages[chunks - 1 - chunk], microbatch) for chunk, microbatch in in_order]
    # The first group passes all chunks but the last; and each later rank adds two: one pass to it, one from it.
    num_ahead = min(total, 2 * (size - rank - 1) + (chunks - 1) * size)
    steady = zip(forward[num_ahead:], backward, strict=False)
    return (*forward[:num_ahead], *chain.from_iterable(steady), *backward[total - num_ahead :])
