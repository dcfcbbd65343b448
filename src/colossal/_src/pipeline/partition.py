"""How the layers of a model are shared out to the stages of a pipeline."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

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
        last = len(weights) - (num_stages - stage - 1)
        heaviest = {
            end: min(
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
