"""How the layers of a model are shared out to the stages of a pipeline."""

import statistics
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.cluster import host_group
from colossal._src.pipeline.execution_sequence import is_sequence, unit_names
from colossal._src.pipeline.microbatch import map_tensors, tensors_in
from colossal._src.pipeline.stage_extraction import layers_of
from colossal._src.tensor import Stages, configs_with_cache
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError, PlanError


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
    """Give each stage the number of layers that the caller chose.

    Args:
        counts: The number of layers of each stage.
        num_layers: Layers of the model, if the numbers are to be checked against it.

    Returns:
        The layers of each stage.

    Raises:
        ConfigError: A stage has none, or they are not as many as the model has.

    Example:
        >>> from colossal._src.pipeline import partition_by_counts
        >>> partition_by_counts([1, 3])
        [range(0, 1), range(1, 4)]
    """
    if min(counts) < 1 or num_layers not in (None, sum(counts)):
        raise ConfigError(
            "Each stage of a pipeline has a layer at least, and together they have the layers of the model. Found "
            f"{list(counts)} for {sum(counts) if num_layers is None else num_layers} layers. Change the numbers."
        )
    return [range(*pair) for pair in pairwise([0, *accumulate(counts)])]


def stage_of_layer(layers: Sequence[range], layer: int) -> int:
    """Find the stage that has a layer.

    Args:
        layers: The layers of each stage.
        layer: The layer.

    Returns:
        The index of the stage.

    Example:
        >>> from colossal._src.pipeline import stage_of_layer
        >>> stage_of_layer([range(0, 2), range(2, 5)], layer=2)
        1
    """
    return bisect_right([each.start for each in layers], layer) - 1


def _check(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"Each stage of a pipeline has a layer at least. Found {num_layers} layers for {num_stages} stages. Use "
            f"at most {num_layers} stages, or fewer chunks of the model on each rank."
        )


def count_layer_parameters(model: nn.Module, stages: Stages | None = None) -> list[int]:
    """Count the parameters of each layer.

    Args:
        model: The full model: a `torch.nn.Sequential`, an `ExecutionSequence`, or one that has a plan.
        stages: What the plan says of a model that is no sequence.

    Returns:
        The number of parameters of each layer; those that several layers have count in each.

    Raises:
        PlanError: The model is no sequence, and there is no plan, or it does not fit.

    Example:
        >>> from torch import nn
        >>> from colossal.pipeline import count_layer_parameters, partition_balanced
        >>> weights = count_layer_parameters(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
        >>> weights, partition_balanced(weights, num_stages=2)
        ([20, 0, 5], [range(0, 1), range(1, 3)])
    """
    return [sum(each.numel() for each in layer.parameters()) for layer in _layers_of(model, stages)]


def measure_layer_times(model: nn.Module, inputs: Any, stages: Stages | None = None, num_runs: int = 5) -> list[float]:
    """Measure how long each layer takes, forward and backward.

    The model runs once, to record the inputs of each layer; then each layer runs by itself. With a default process
    group, all ranks get the measurements of rank 0, so that all of them partition the model in the same way.

    Args:
        model: The full model, with values, on the device where it is measured: a `torch.nn.Sequential`, an
            `ExecutionSequence`, or one that has a plan. Gradients stay as they are.
        inputs: A micro-batch for it: a mapping is passed by names, anything else is the only argument.
        stages: What the plan says of a model that is no sequence.
        num_runs: How often each layer runs; the median counts.

    Returns:
        Seconds of each layer.

    Raises:
        ConfigError: `num_runs` is not positive.
        PlanError: The model is no sequence, and there is no plan, or a layer does not run.

    Communication: broadcast, of 8 bytes for each layer, from the first process to all others.

    Example:
        >>> import torch
        >>> from colossal.pipeline import measure_layer_times
        >>> wide = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> len(measure_layer_times(wide, torch.ones(4, 8)))
        2
    """
    if num_runs < 1:
        raise ConfigError(f"Layers are measured once at least. Found num_runs={num_runs}. Pass 5, or leave it out.")
    seconds = torch.tensor(_measure(model, inputs, stages, num_runs), dtype=torch.float64, device="cpu")
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(seconds, 0, host_group())
    return seconds.tolist()


def _measure(model: nn.Module, inputs: Any, stages: Stages | None, num_runs: int) -> list[float]:
    layers: Sequence[nn.Module] = _layers_of(model, stages)
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def note(layer: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(layer, (args, kwargs))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in set(layers)]
    try:
        with torch.no_grad(), _without_cache(model):
            model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    missed = [index for index, layer in enumerate(layers) if layer not in calls]
    if missed:
        raise PlanError(
            f"A forward pass calls all layers of its model. Found that {type(model).__name__} left out {missed}. "
            "Turn off what leaves layers out, such as layerdrop."
        )
    medians = {layer: _median(layer, args, kwargs, num_runs) for layer, (args, kwargs) in calls.items()}
    return [medians[layer] for layer in layers]


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Let models of Hugging Face keep no keys and values, which would grow from run to run."""
    before = [(config, config.use_cache) for config in configs_with_cache(model)]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, uses in before:
            config.use_cache = uses


def _median(layer: nn.Module, args: Any, kwargs: Any, num_runs: int) -> float:
    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    args, kwargs = map_tensors(args, leaf), {name: map_tensors(value, leaf) for name, value in kwargs.items()}
    sources = [each for each in (*tensors_in((args, kwargs)), *layer.parameters()) if each.requires_grad]
    found, synchronize = [], get_accelerator().synchronize
    for _ in range(num_runs + 1):
        synchronize()
        begin = time.perf_counter()
        outputs = [each for each in tensors_in(layer(*args, **kwargs)) if each.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, sources, [torch.ones_like(each) for each in outputs], allow_unused=True)
        synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])  # the first run warms up


def _layers_of(model: nn.Module, stages: Stages | None) -> Sequence[nn.Module]:
    if is_sequence(model):
        return [model.get_submodule(name) for name in unit_names(model)]
    if stages is None:
        raise PlanError(
            "Layers are those of a sequence, or those that a plan names. Found "
            f"{type(model).__name__} without a plan. Pass stages, such as colossal.shardformer.plan_of(model).stages."
        )
    return layers_of(model, stages)
