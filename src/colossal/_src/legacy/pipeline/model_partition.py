"""Layers of a model for the chunks of each rank: by the older functions, which give bounds by rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from colossal._src.cluster import ambient_mesh
from colossal._src.lazy import materialize
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.pipeline.layer_spec import LayerSpec
from colossal._src.legacy.pipeline.shared_modules import mark_full_names
from colossal._src.legacy.registry import LAYERS, MODELS
from colossal._src.pipeline import (
    ExecutionSequence,
    SharedParameter,
    StagePlacement,
    copy_structure,
    extract_sequence_stage,
    partition_by_counts,
)
from colossal._src.pipeline import partition_balanced as balance
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger

Bounds = list[tuple[int, int]]
"""For each chunk of one rank, its first layer and the one after its last."""


def partition_uniform(num_items: int, pipeline_parallel_size: int, num_chunks: int) -> list[Bounds]:
    """Give each rank equally many layers of each chunk; what is left over goes to later ranks.

    Args:
        num_items: Layers of the model.
        pipeline_parallel_size: Ranks of the pipeline.
        num_chunks: Chunks of each rank.

    Returns:
        For each rank, the bounds of its chunks: the first layer, and the one after the last.

    Raises:
        ConfigError: The layers do not divide by `num_chunks`, or a stage would have none.

    Example:
        >>> from colossal.legacy.pipeline import partition_uniform
        >>> partition_uniform(10, pipeline_parallel_size=2, num_chunks=2)
        [[(0, 2), (5, 7)], [(2, 5), (7, 10)]]
    """
    if num_chunks < 1 or pipeline_parallel_size < 1 or num_items % num_chunks:
        raise ConfigError(
            f"Layers divide by the number of chunks. Found {num_items} layers and num_chunks={num_chunks} on "
            f"{pipeline_parallel_size} ranks. Use other numbers, or partition_balanced, which takes any number."
        )
    each, left = divmod(num_items // num_chunks, pipeline_parallel_size)
    counts = [each + (rank >= pipeline_parallel_size - left) for rank in range(pipeline_parallel_size)]
    return _by_rank(partition_by_counts(counts * num_chunks), pipeline_parallel_size)


def partition_balanced(weights: Sequence[float], pipeline_parallel_size: int, num_chunks: int) -> list[Bounds]:
    """Partition layers so that the heaviest stage is as light as possible.

    Args:
        weights: What each layer weighs, such as its parameters.
        pipeline_parallel_size: Ranks of the pipeline.
        num_chunks: Chunks of each rank.

    Returns:
        For each rank, the bounds of its chunks.

    Raises:
        ConfigError: There are more stages than layers, or a weight is negative.

    Example:
        >>> from colossal.legacy.pipeline import partition_balanced
        >>> partition_balanced([4, 1, 1, 2], pipeline_parallel_size=2, num_chunks=1)
        [[(0, 1)], [(1, 4)]]
    """
    return _by_rank(balance(weights, pipeline_parallel_size * num_chunks), pipeline_parallel_size)


def build_pipeline_model(layers: nn.Sequential, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """Keep the layers of this rank of a sequence, partitioned by `partition_uniform` over the ambient mesh.

    Args:
        layers: The full model; changed in place.
        num_chunks: Chunks of each rank.
        verbose: Log the layers of this rank.

    Returns:
        A module with the names of the full model; a `torch.nn.ModuleList` of several chunks.

    Raises:
        ConfigError: The layers do not divide by `num_chunks`, or a stage would have none.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.pipeline import build_pipeline_model
        >>> from colossal.testing import fake_world
        >>> with fake_world(2, rank=1), ParallelMesh(pp=2):
        ...     part = build_pipeline_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
        >>> [name for name, _ in part.named_parameters()]
        ['1.weight', '1.bias']
    """
    superseded("build_pipeline_model", "Booster(plugin=HybridParallelPlugin(...)).boost(sequential)")
    rank, size = pipeline_rank_and_size()
    parts = partition_uniform(len(layers), size, num_chunks)
    if verbose:
        get_dist_logger().info(f"Rank {rank} of the pipeline has the layers {parts[rank]} of {len(layers)}.")
    return keep_chunks(layers, parts, rank)


class ModelFromConfig(nn.Module, ABC):
    """A model that lists its layers as configurations, so that a rank builds its own only.

    A subclass fills `layers_cfg` in its constructor, with a `LayerSpec` or a dict of ``type``, the class, and keywords
    for each layer, and says in `init_weights` how the layers start.

    Attributes:
        layers: The layers that were built.
        layers_cfg: What each layer of the full model is built from.

    Example:
        >>> import torch
        >>> from colossal.legacy.pipeline import ModelFromConfig
        >>> class Wide(ModelFromConfig):
        ...     def __init__(self, num_layers):
        ...         super().__init__()
        ...         self.layers_cfg += [{"type": torch.nn.Linear, "in_features": 4, "out_features": 4}] * num_layers
        ...     def init_weights(self): ...
        >>> model = Wide(4)
        >>> model.build_from_cfg(1, 3)
        >>> [name for name, _ in model.named_parameters()]
        ['layers.1.weight', 'layers.1.bias', 'layers.2.weight', 'layers.2.bias']
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.layers_cfg: list[LayerSpec | dict[str, Any]] = []

    def build_from_cfg(self, start: int | None = None, end: int | None = None) -> None:
        """Build some of the layers, and initialize them.

        Args:
            start: The first; by default that of the model.
            end: The one after the last; by default, all that follow.
        """
        for index in range(len(self.layers_cfg))[start:end]:
            self.layers[str(index)] = _spec_of(self.layers_cfg[index]).build()
        self.init_weights()

    @abstractmethod
    def init_weights(self) -> None:
        """Initialize the layers that were built."""

    def forward(self, x: Any) -> Any:
        """Run the layers that were built one after the other.

        Args:
            x: The input of the first.

        Returns:
            What the last returns.
        """
        for layer in self.layers.values():
            x = layer(x)
        return x


def build_pipeline_model_from_cfg(
    config: Mapping[str, Any], num_chunks: int = 1, partition_method: str = "parameter", verbose: bool = False
) -> nn.Module:
    """Build the layers of this rank of a model that lists them as configurations.

    Args:
        config: ``type``, a subclass of `ModelFromConfig` or its name in the registry ``MODELS``, and its keywords.
        num_chunks: Chunks of each rank.
        partition_method: ``"layer"`` for equal numbers of layers, or ``"parameter"`` for stages of equal size.
        verbose: Log the layers of this rank.

    Returns:
        A model of this rank's layers; a `torch.nn.ModuleList` of several chunks.

    Raises:
        ConfigError: The type is no such class, there is no such method, or layers do not fit the stages.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.pipeline import ModelFromConfig, build_pipeline_model_from_cfg
        >>> from colossal.testing import fake_world
        >>> class Wide(ModelFromConfig):
        ...     def __init__(self, num_layers):
        ...         super().__init__()
        ...         self.layers_cfg += [{"type": torch.nn.Linear, "in_features": 4, "out_features": 4}] * num_layers
        ...     def init_weights(self): ...
        >>> with fake_world(2, rank=1), ParallelMesh(pp=2):
        ...     model = build_pipeline_model_from_cfg(dict(type=Wide, num_layers=4))
        >>> list(model.layers)
        ['2', '3']
    """
    superseded("build_pipeline_model_from_cfg", "StageModules([module of each chunk of this rank])")
    rank, size = pipeline_rank_and_size()
    kind, keywords = config.get("type"), {name: value for name, value in config.items() if name != "type"}
    if isinstance(kind, str):
        kind = MODELS.get_module(kind)
    if not (isinstance(kind, type) and issubclass(kind, ModelFromConfig)):
        raise ConfigError(
            f"The type of a model that is built by its configuration is a subclass of ModelFromConfig. Found {kind!r}. "
            "Pass dict(type=YourModel, ...)."
        )
    layers = kind(**keywords).layers_cfg
    if partition_method == "layer":
        parts = partition_uniform(len(layers), size, num_chunks)
    elif partition_method == "parameter":
        parts = partition_balanced([_count(_spec_of(layer)) for layer in layers], size, num_chunks)
    else:
        raise ConfigError(
            f"Layers are partitioned by 'layer' or 'parameter'. Found partition_method={partition_method!r}. Pass one."
        )
    if verbose:
        get_dist_logger().info(f"Rank {rank} of the pipeline builds the layers {parts[rank]} of {len(layers)}.")
    chunks: list[nn.Module] = []
    for begin, end in parts[rank]:
        chunk = kind(**keywords)
        chunk.build_from_cfg(begin, end)
        mark_full_names(chunk, {})
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)


def keep_chunks(
    model: nn.Sequential | ExecutionSequence, parts: Sequence[Sequence[tuple[int, int]]], rank: int
) -> nn.Module:
    """Keep the chunks of a rank of a full sequence, whose other layers are dropped."""
    num_chunks = len(parts[rank])
    placement = StagePlacement(len(parts), num_chunks)
    layers = [range(*parts[placement.rank_of(stage)][stage // len(parts)]) for stage in range(placement.num_stages)]
    own = placement.stages_of(rank)
    # A stage takes its modules out of the model, so that each one needs a model of its own.
    chunks: list[Any] = [*(copy_structure(model) for _ in own[1:]), model]
    shared = [extract_sequence_stage(chunk, layers, stage) for chunk, stage in zip(chunks, own, strict=True)]
    materialize(nn.ModuleList(chunks))  # together, so that chunks keep a parameter that several of them have
    for chunk, stage in zip(chunks, own, strict=True):
        mark_full_names(chunk, dict(_tied_of(chunk, stage, shared[0], placement)))
    return chunks[0] if num_chunks == 1 else nn.ModuleList(chunks)


def _tied_of(
    chunk: nn.Module, stage: int, shared: Sequence[SharedParameter], placement: StagePlacement
) -> list[tuple[str, nn.Parameter]]:
    """Find the parameters that stages of other ranks have too, each with a key that is the same there."""
    return [
        (f"sequence: {each.names[0]}", chunk.get_parameter(each.names[each.stages.index(stage)]))
        for each in shared
        if stage in each.stages and len(each.ranks(placement)) > 1
    ]


def pipeline_rank_and_size() -> tuple[int, int]:
    """Return the index of this rank on the pp axis of the ambient mesh, and the size of that."""
    mesh = ambient_mesh()
    return (0, 1) if mesh is None else (mesh.rank("pp"), mesh.size("pp"))


def _by_rank(stages: Sequence[range], size: int) -> list[Bounds]:
    return [[(stage.start, stage.stop) for stage in stages[rank::size]] for rank in range(size)]


def _spec_of(layer: LayerSpec | Mapping[str, Any]) -> LayerSpec:
    if isinstance(layer, LayerSpec):
        return layer
    kind: Any = layer.get("type")
    if isinstance(kind, str):
        kind = LAYERS.get_module(kind)
    if not callable(kind):
        raise ConfigError(
            f"A layer is a LayerSpec, or a dict whose type is its class or the name of one. Found {layer!r}. Pass "
            "dict(type=Class, ...)."
        )
    made: Callable[..., nn.Module] = cast("Any", kind)
    return LayerSpec(made, **{name: value for name, value in layer.items() if name != "type"})


def _count(spec: LayerSpec) -> int:
    with torch.random.fork_rng():
        spec.count_params()
    return spec.param_count
