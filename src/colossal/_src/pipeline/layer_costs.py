"""The costs of the layers of a model, by which `partition_balanced` assigns them to stages."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.cluster import host_group
from colossal._src.pipeline.execution_sequence import is_layer_sequence, unit_names
from colossal._src.pipeline.microbatch import map_tensors, tensors_in
from colossal._src.pipeline.stage_extraction import layers_of
from colossal._src.tensor import Stages, configs_with_cache
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError, PlanError


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
        # The first call counts, as a layer may run several times.
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
            # Not `backward`, which would add to the gradients of the parameters.
            torch.autograd.grad(outputs, sources, [torch.ones_like(each) for each in outputs], allow_unused=True)
        synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])  # the first run warms up


def _layers_of(model: nn.Module, stages: Stages | None) -> Sequence[nn.Module]:
    if is_layer_sequence(model):
        return [model.get_submodule(name) for name in unit_names(model)]
    if stages is None:
        raise PlanError(
            "Layers are those of a sequence, or those that a plan names. Found "
            f"{type(model).__name__} without a plan. Pass stages, such as colossal.shardformer.plan_of(model).stages."
        )
    return layers_of(model, stages)
