"""Stages whose modules the user built on each rank, so that no rank ever has the full model."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import gather_objects
from colossal._src.pipeline.execution_sequence import is_layer_sequence
from colossal._src.pipeline.schedule.stage_placement import SharedParameter, StagePlacement
from colossal._src.pipeline.stage import Stage, StageOutput, model_arguments
from colossal._src.tensor import placement_of, unwrap_adapters
from colossal.errors import ConfigError, UnsupportedError

Tied = nn.Module | nn.Parameter
"""What is tied: a parameter, or all those of a module, in their order."""

StageArguments = Callable[[StageOutput | None, Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""Makes the arguments of a module from the previous stage's output, None on the first stage, and the micro-batch."""


@final
class StageModules(nn.Module):
    """The stages of this rank of a model of which each rank has built its own only.

    `Booster.boost` takes it in the place of a model, under a `HybridParallelPlugin` with as many chunks on each rank;
    `Booster.execute_pipeline` runs it. Everything else is as for a model that the plugin partitions: schedules,
    gradient norms, ZeRO, mixed precision, checkpoints. Layers may be those of `colossal.nn` in any mode of the tp axis,
    built on the same mesh.

    The first stage is called with the micro-batch: a mapping by names, of a tuple as many values as its forward method
    requires. Any other stage gets the output of the previous one by position, a tuple as several arguments, and of a
    mapping every keyword that its forward method takes, as the first stage does.

    In checkpoints, parameters have the names that they have in ``torch.nn.Sequential(*stages)`` of all stages in their
    order, such as ``1.head.weight``, unless `has_full_names` is set.

    Args:
        modules: The stage of this rank, or its chunks in order: with interleaved stages, of 2 ranks the first has the
            stages 0 and 2; in a V, 0 and 3.
        tied: What stages of several ranks have in common, by a key that is the same on these ranks: a parameter, or a
            module all of whose parameters are meant, or a list of such. All start from the values of the first rank,
            and each gets the sum of all gradients. Within one rank, use one parameter object; it needs no key then.
        has_full_names: The modules' parameters have different names on all stages, under which checkpoints save them.
        stage_arguments: Makes the arguments and keywords of each stage, in place of the above, from the output of the
            previous stage, None for the first, and the micro-batch.

    Attributes:
        chunks: The modules, in their order.

    Raises:
        ConfigError: There is no module, or what is tied is not in a module, or is not one parameter on this rank.

    Example:
        >>> import torch
        >>> from colossal.booster.plugin import HybridParallelPlugin
        >>> from colossal.pipeline import StageModules
        >>> from colossal.testing import fake_world
        >>> with fake_world(2, rank=1):
        ...     plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=4)
        ...     is_first = plugin.stage_manager.is_first_stage()
        ...     model = StageModules(torch.nn.Linear(4, 8) if is_first else torch.nn.Linear(8, 1))
        >>> [tuple(parameter.shape) for parameter in model.parameters()]  # then booster.boost(model, optimizer)
        [(1, 8), (1,)]
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        *,
        tied: Mapping[str, Tied | Sequence[Tied]] | None = None,
        has_full_names: bool = False,
        stage_arguments: StageArguments | None = None,
    ) -> None:
        super().__init__()
        chunks = list(modules) if isinstance(modules, (nn.ModuleList, list, tuple)) else [modules]
        if not chunks or not all(isinstance(each, nn.Module) for each in chunks):
            raise ConfigError(
                "A rank of a pipeline has a stage, or one for each of its chunks. Found "
                f"{[type(each).__name__ for each in chunks]}. Pass a module, or a list of modules."
            )
        self.chunks = nn.ModuleList(chunks)  # pyright: ignore[reportArgumentType]
        self.has_full_names = has_full_names
        self._stage_arguments = stage_arguments
        self._tied = {
            f"{key}/{number}": parameter
            for key, held in (tied or {}).items()
            for number, parameter in enumerate(_parameters_of(key, held))
        }
        own = set(self.parameters())
        if strange := [key for key, parameter in self._tied.items() if parameter not in own]:
            raise ConfigError(
                f"Stages are tied by parameters that they have. Found that no module has {', '.join(strange)}. Pass "
                "parameters of these modules, after they were moved or converted."
            )

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: no rank has the full model.

        Args:
            *_args: Of no use.
            **_kwargs: Of no use.

        Returns:
            Nothing.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "The stages of a pipeline are run by booster.execute_pipeline, after Booster(plugin=HybridParallelPlugin("
            "tp_size=..., pp_size=...)).boost(...). Found a call of StageModules, as any other plugin makes. Use that "
            "plugin with pp_size=2 or more; with one stage, boost the module itself."
        )

    def outline(self, placement: StagePlacement, mesh: ParallelMesh) -> "FullOutline":
        """Exchange with the other ranks of a pipeline what the full model is.

        Args:
            placement: Which rank has which stage.
            mesh: The mesh.

        Returns:
            The names of all stages' parameters.

        Raises:
            ConfigError: A rank has another number of modules, what is tied differs between ranks, or two tensors would
                have the same name; on all ranks.

        Communication: all_gather_object, pp, of all names.
        """
        own = _outline_of(self.chunks, self._tied, mesh.rank("pp"))
        ranks = gather_objects(own, [mesh.group("pp")])
        _check(ranks, placement)
        return FullOutline(ranks, placement, has_full_names=self.has_full_names)

    def to_stages(self, outline: "FullOutline", rank: int) -> list[Stage]:
        """Make the stages that an executor runs.

        Args:
            outline: What `outline` returned.
            rank: The index of this rank on the pp axis.

        Returns:
            A stage for each module.
        """
        stages = []
        for module, index in zip(self.chunks, outline.placement.stages_of(rank), strict=True):
            named = module if self.has_full_names else _NamedModule(str(index), module)
            arguments = self._stage_arguments or _choose_arguments(module)
            stages.append(Stage(named, index, outline.placement.num_stages, None, outline.shared, arguments))
        return stages


class _ChunkOutline(NamedTuple):
    """Names of one module, each with what says which tensor it is, and what torch notes of its modules."""

    state: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    metadata: dict[str, Any]


class _RankOutline(NamedTuple):
    """What one rank has."""

    chunks: tuple[_ChunkOutline, ...]
    tied: dict[str, str]  # what the parameter of each key is like
    is_compute_sharded: bool  # whether ranks compute with shards of any parameter


@final
class FullOutline:
    """The names of a model whose stages are on different ranks, in the order of the stages."""

    def __init__(self, ranks: Sequence[_RankOutline], placement: StagePlacement, *, has_full_names: bool) -> None:
        self.placement = placement
        self.is_compute_sharded = any(rank.is_compute_sharded for rank in ranks)
        self.state: dict[str, str] = {}
        """Every name of the full model's state, with the first name of the same tensor."""
        self.metadata: dict[str, Any] = {"": {"version": 1}}
        """The versions of all modules, as torch writes them into a state dict."""
        self.parameters: dict[str, list[str]] = {}
        """All names of each parameter, by its first."""
        places: dict[str, list[tuple[int, str]]] = {}
        first: dict[str, str] = {}
        for stage in range(placement.num_stages):
            rank = placement.rank_of(stage)
            chunk = ranks[rank].chunks[placement.stages_of(rank).index(stage)]
            prefix = "" if has_full_names else f"{stage}."
            for name, identity in chunk.state:
                _add(self.state, f"{prefix}{name}", first.setdefault(identity, f"{prefix}{name}"))
            for name, identity in chunk.parameters:
                places.setdefault(identity, []).append((stage, f"{prefix}{name}"))
            self.metadata |= {f"{prefix}{name}".rstrip("."): value for name, value in chunk.metadata.items()}
        self.parameters = {found[0][1]: [name for _, name in found] for found in places.values()}
        self.shared = tuple(_shared(found) for found in places.values() if len({stage for stage, _ in found}) > 1)

    def names_of(self, stages: Sequence[Stage]) -> dict[nn.Parameter, list[str]]:
        """Find all names, in the full model, of the parameters of a rank.

        Args:
            stages: The stages of the rank.

        Returns:
            The names of each parameter, those of other stages among them.
        """
        all_names = {name: names for names in self.parameters.values() for name in names}
        return {
            parameter: all_names[name]
            for stage in stages
            for name, parameter in stage.module.named_parameters(remove_duplicate=False)
        }


@final
class _NamedModule(nn.Module):
    """The module of a stage under its name in the full model."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(self._name)(*args, **kwargs)


def _choose_arguments(module: nn.Module) -> StageArguments:
    signature = inspect.signature(unwrap_adapters(module).forward)

    def choose(carry: StageOutput | None, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if carry is None:
            return model_arguments(signature, inputs)
        # Modules of a sequence hand on one value, which may be a tuple.
        args = carry if isinstance(carry, tuple) and not is_layer_sequence(module) else (carry,)
        if not isinstance(inputs, Mapping):
            return args, {}
        # The previous stage's output takes the place of what the first stage has found in the batch by this name.
        filled = list(signature.parameters)[: len(args)]
        kwargs = model_arguments(signature, inputs)[1]
        return args, {name: value for name, value in kwargs.items() if name not in filled}

    return choose


def _parameters_of(key: str, held: Tied | Sequence[Tied]) -> Iterator[nn.Parameter]:
    """Find the parameters of one key: those of all modules that this rank ties by it are the same objects."""
    several = [held] if isinstance(held, (nn.Module, nn.Parameter)) else list(held)
    found = [list(each.parameters()) if isinstance(each, nn.Module) else [each] for each in several]
    if not found or any(list(map(id, each)) != list(map(id, found[0])) for each in found):
        raise ConfigError(
            f"What one rank ties by one key are the same parameters. Found {len(found)} sets of parameters for "
            f"{key!r}. Within a rank, assign the parameter of one module to the others, such as head.weight = "
            "embedding.weight."
        )
    yield from found[0]


def _outline_of(chunks: nn.ModuleList, tied: Mapping[str, nn.Parameter], rank: int) -> _RankOutline:
    identities = {id(parameter): f"tied {key}" for key, parameter in tied.items()}

    def identity(value: Any) -> str:
        return identities.setdefault(id(value), f"rank {rank}, {len(identities)}")

    outlines = []
    for chunk in chunks:
        state: Any = chunk.state_dict(keep_vars=True)
        outlines.append(
            _ChunkOutline(
                tuple((name, identity(value)) for name, value in state.items()),
                tuple((name, identity(value)) for name, value in chunk.named_parameters(remove_duplicate=False)),
                dict(getattr(state, "_metadata", {})),
            )
        )
    kinds = {
        key: f"{list(placement_of(each).shape)} ({list(each.shape)} on a rank), {each.dtype}, "
        f"{'trained' if each.requires_grad else 'frozen'}"
        for key, each in tied.items()
    }
    is_sharded = any(placement_of(parameter).is_compute_sharded for parameter in chunks.parameters())
    return _RankOutline(tuple(outlines), kinds, is_sharded)


def _check(ranks: Sequence[_RankOutline], placement: StagePlacement) -> None:
    """Reject on all ranks what does not fit together."""
    numbers = [len(rank.chunks) for rank in ranks]
    if set(numbers) != {placement.num_chunks}:
        raise ConfigError(
            f"Each rank of this pipeline has {placement.num_chunks} stages. Found modules for {numbers} stages on its "
            f"{len(ranks)} ranks. Build a module for each of placement.stages_of(rank), or change num_model_chunks."
        )
    for key in dict.fromkeys(key for rank in ranks for key in rank.tied):
        kinds = {number: rank.tied[key] for number, rank in enumerate(ranks) if key in rank.tied}
        if len(kinds) == 1 or len(set(kinds.values())) > 1:
            raise ConfigError(
                f"What is tied is on several ranks, in one shape and dtype. Found for {key!r} {kinds}, by ranks of the "
                "pp axis. Tie equal parameters by the same key on each of these ranks."
            )


def _add(state: dict[str, str], name: str, first: str) -> None:
    if name in state:
        raise ConfigError(
            f"Full names are different on all stages. Found {name} twice. Leave has_full_names out, so that the index "
            "of the stage precedes each name."
        )
    state[name] = first


def _shared(places: Sequence[tuple[int, str]]) -> SharedParameter:
    # Reversed, so that of several names on one stage the first one stays.
    by_stage = dict(reversed(places))
    stages = tuple(sorted(by_stage))
    return SharedParameter(tuple(by_stage[stage] for stage in stages), stages)
