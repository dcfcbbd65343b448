"""A model that is built without memory, and partitioned before its values are made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Any, Self, final

from torch import nn

from colossal._src.lazy import LazyInitContext
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.pipeline.model_partition import Bounds, keep_chunks, partition_balanced, partition_uniform
from colossal._src.legacy.registration_hooks import registration_hook
from colossal._src.pipeline import ExecutionSequence, copy_structure, is_layer_sequence
from colossal.errors import ConfigError

Policy = str | Mapping[int, Sequence[tuple[int, int]]]
"""How layers are partitioned: a name, or for each rank the bounds of its chunks."""

SPLIT_NODE = "SPLIT_NODE"
"""A step of a sequence, between the stages of the policy ``"customized"``."""

_POLICIES = ("balanced", "uniform", "customized")


@final
class PipelinableContext:
    """A model that is built inside takes no memory; `partition` then makes the layers of one rank only.

    Args:
        policy: ``"balanced"`` for stages of equally many parameters, ``"uniform"`` for equally many layers,
            ``"customized"`` for the borders ``"SPLIT_NODE"`` in the sequence, or for each rank the bounds of its
            chunks: ``{0: [(0, 3)], 1: [(3, 9)]}``.

    Raises:
        ConfigError: There is no such policy.

    Example:
        >>> import torch
        >>> from colossal.legacy.pipeline import PipelinableContext
        >>> with PipelinableContext(policy="uniform") as pipelinable:
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> pipelinable.to_layer_list(["0", "1", "2"])
        >>> chunk = pipelinable.partition(num_chunks=1, pipeline_size=2, rank=0)
        >>> pipelinable.layers_count, [name for name, _ in chunk.named_parameters()]
        (3, ['0.weight', '0.bias'])
    """

    def __init__(self, policy: Policy = "balanced") -> None:
        superseded("PipelinableContext", "LazyInitContext() and ExecutionSequence(model, steps)")
        if policy not in _POLICIES and not isinstance(policy, Mapping):
            raise ConfigError(
                f"A policy is {', '.join(_POLICIES)}, or the bounds for each rank. Found {policy!r}. Pass one of them."
            )
        self.policy = policy
        self._lazy = LazyInitContext()
        self._parents: dict[int, nn.Module] = {}
        self._children: dict[int, nn.Module] = {}  # the modules themselves, as another could get the id of a freed one
        self._sequence: nn.Sequential | ExecutionSequence | None = None
        self._splits: list[int] = []
        self._num_functions = self._num_layers = 0
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Begin to build without memory, and to look for the model."""

        def note(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
            self._parents[id(parent)] = parent
            if child is not None:
                self._children[id(child)] = child

        self._contexts.enter_context(registration_hook("module", note))
        self._contexts.enter_context(self._lazy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""
        self._contexts.__exit__(kind, error, traceback)

    @property
    def layers_count(self) -> int:
        """The number of layers, which are partitioned."""
        return self._num_layers

    @property
    def funcs_count(self) -> int:
        """The number of functions between them."""
        return self._num_functions

    def to_layer_list(self, exec_seq: Sequence[str | Callable[..., Any] | tuple[Any, str]] | None = None) -> None:
        """Say in which order the modules of the model run.

        Args:
            exec_seq: Names of modules and functions, as `ExecutionSequence` takes them, and ``"SPLIT_NODE"``; may be
                left out for a `torch.nn.Sequential`, and for one model whose modules run in the order in which they are
                assigned; those of a list or a sequence in it are counted one by one.

        Raises:
            ConfigError: There is not one model that has these modules, or a border is between no modules.
        """
        if exec_seq is None:
            self._sequence = self._sequential()
            self._num_layers = len(self._sequence)
            return
        steps = [step for step in exec_seq if step != SPLIT_NODE]
        self._splits = [
            sum(isinstance(step, str) and step != SPLIT_NODE for step in exec_seq[:position])
            for position, step in enumerate(exec_seq)
            if step == SPLIT_NODE
        ]
        self._num_functions = sum(not isinstance(step, str) for step in steps)
        names = {step for step in steps if isinstance(step, str)}
        self._sequence = ExecutionSequence(self._find_model(names), steps)
        self._num_layers = len(self._sequence)

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> nn.Module:
        """Make the layers of one rank. Those of other ranks stay without memory, and it may be called again.

        Args:
            num_chunks: Chunks of each rank.
            pipeline_size: Ranks of the pipeline.
            rank: The index of the rank among these.

        Returns:
            A module with the names of the full model; a `torch.nn.ModuleList` of several chunks.

        Raises:
            ConfigError: `to_layer_list` was not called, or the policy does not fit the numbers.
        """
        if self._sequence is None:
            raise ConfigError(
                "A model is partitioned in the order in which its modules run. Found no such order. Call "
                "to_layer_list(exec_seq) first."
            )
        parts = self._parts(num_chunks, pipeline_size)
        flat = [parts[one][chunk] for chunk in range(num_chunks) for one in range(pipeline_size)]
        bounds = [border for part in flat for border in part]
        if bounds[0] != 0 or bounds[-1] != self.layers_count or bounds[1:-1:2] != bounds[2::2]:
            raise ConfigError(
                f"Stages have all {self.layers_count} layers, one after the other. Found {flat}. Pass bounds that meet."
            )
        # a stage takes its modules out of the model, which another call partitions again
        model: Any = copy_structure(self._sequence)
        return keep_chunks(model, parts, rank)

    def _parts(self, num_chunks: int, size: int) -> list[Bounds]:
        assert self._sequence is not None
        if isinstance(self.policy, Mapping):
            parts = [[(begin, end) for begin, end in self.policy.get(rank, ())] for rank in range(size)]
        elif self.policy == "customized":
            stages = [0, *self._splits, self.layers_count]
            found = list(pairwise(stages))
            parts = [found[rank::size] for rank in range(size)]
        elif self.policy == "uniform":
            parts = partition_uniform(self.layers_count, size, num_chunks)
        else:
            weights = [sum(each.numel() for each in layer.parameters()) for layer in self._layers()]
            parts = partition_balanced(weights, size, num_chunks)
        if {len(part) for part in parts} != {num_chunks} or any(begin >= end for part in parts for begin, end in part):
            raise ConfigError(
                f"Each of {size} ranks has {num_chunks} chunks, each with a layer at least. Found {parts} by the "
                f"policy {self.policy!r}. Pass bounds, or put {SPLIT_NODE!r}, for each border between stages."
            )
        return parts

    def _layers(self) -> list[nn.Module]:
        sequence = self._sequence
        assert sequence is not None
        names = sequence.names if isinstance(sequence, ExecutionSequence) else [name for name, _ in _children(sequence)]
        return [sequence.get_submodule(name) for name in names]

    def _roots(self) -> list[nn.Module]:
        return [parent for key, parent in self._parents.items() if key not in self._children]

    def _sequential(self) -> nn.Sequential | ExecutionSequence:
        roots = self._roots()
        found = [root for root in roots if is_layer_sequence(root)] or roots
        if len(found) != 1:
            raise ConfigError(
                f"One model is partitioned in its own order. Found {len(found)} of them among the models "
                f"{[type(root).__name__ for root in roots]} that were built. Pass exec_seq."
            )
        (model,) = found
        return model if is_layer_sequence(model) else ExecutionSequence(model, list(_assigned(model)))

    def _find_model(self, names: set[str]) -> nn.Module:
        found = [root for root in self._roots() if names <= {name for name, _ in root.named_modules()}]
        if len(found) != 1:
            raise ConfigError(
                f"One model with the modules {sorted(names)} is built inside of the context. Found {len(found)} among "
                f"{[type(root).__name__ for root in self._roots()]}. Name modules that one model has."
            )
        return found[0]


def _assigned(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names of the modules of a model in the order in which they were assigned; lists are opened."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from _assigned(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _children(sequence: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in sequence.named_modules(remove_duplicate=False) if name and "." not in name]
