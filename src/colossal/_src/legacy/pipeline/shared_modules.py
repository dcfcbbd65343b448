"""Modules of the older API as the stages of this rank, and the modules that several of them have."""

from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from colossal._src.cluster import ambient_mesh
from colossal._src.comm import gather_objects
from colossal._src.legacy.notice import superseded
from colossal._src.pipeline import StageArguments, StageModules
from colossal.errors import ConfigError
from colossal.logging import get_dist_logger

_TIED: Any = WeakIdKeyDictionary()  # by parameter, the key by which ranks tie it
_FULL_NAMES: Any = WeakIdKeyDictionary()  # chunks whose parameters have the names of the full model
_num_wrappers = 0


@final
class PipelineSharedModuleWrapper:
    """Parameters that stages of several ranks have, such as those of an embedding and a head.

    Every rank makes as many wrappers, in the same order; those that have the module register it. When the model is
    boosted, all of them get the values of the first rank, and in each step the sum of their gradients.

    Args:
        pipeline_ranks: The ranks of the pipeline that register.

    Raises:
        ConfigError: A rank is negative, or there is none.

    Example:
        >>> import torch
        >>> from colossal.legacy.pipeline import PipelineSharedModuleWrapper
        >>> wrapper = PipelineSharedModuleWrapper([0, 1])
        >>> wrapper.register_module(torch.nn.Embedding(4, 2))
        >>> wrapper.pipeline_ranks
        (0, 1)
    """

    def __init__(self, pipeline_ranks: Sequence[int]) -> None:
        superseded("PipelineSharedModuleWrapper", "StageModules(modules, tied={'embedding': module})")
        if not pipeline_ranks or min(pipeline_ranks) < 0:
            raise ConfigError(
                f"A module is on ranks of the pipeline. Found pipeline_ranks={pipeline_ranks!r}. Pass their indices, "
                "such as [0, pipeline_size - 1]."
            )
        global _num_wrappers  # noqa: PLW0603 (ranks know a wrapper by its number)
        self.pipeline_ranks = tuple(pipeline_ranks)
        self._key, self._count = f"wrapper {_num_wrappers}", 0
        _num_wrappers += 1

    def register_module(self, module: nn.Module) -> None:
        """Tie all parameters of a module to those that other ranks register.

        Args:
            module: The module of this rank.

        Raises:
            ConfigError: This rank is not one of those that the wrapper was made for.
        """
        self._register(module.parameters())

    def register_parameter(self, param: nn.Parameter) -> None:
        """Tie a parameter to that which other ranks register.

        Args:
            param: The parameter of this rank.

        Raises:
            ConfigError: This rank is not one of those that the wrapper was made for.
        """
        self._register([param])

    def _register(self, parameters: Iterable[nn.Parameter]) -> None:
        mesh = ambient_mesh()
        if mesh is not None and mesh.rank("pp") not in self.pipeline_ranks:
            raise ConfigError(
                f"A module is registered by the ranks {list(self.pipeline_ranks)} of the pipeline. Found it on rank "
                f"{mesh.rank('pp')}. Make the wrapper for this rank too."
            )
        for parameter in parameters:
            _TIED[parameter] = f"{self._key}, {self._count}"
            self._count += 1


def mark_full_names(chunk: nn.Module, tied: dict[str, nn.Parameter]) -> None:
    """Remember that a chunk was taken out of a full model, and what other stages of that have too."""
    _FULL_NAMES[chunk] = True
    for key, parameter in tied.items():
        _TIED[parameter] = key


def stage_modules_of(
    model: nn.Module, stage_arguments: StageArguments | None = None, group: dist.ProcessGroup | None = None
) -> StageModules:
    """Make what a booster takes of a model that was built or partitioned for this rank.

    Args:
        model: The chunk of this rank, or a `torch.nn.ModuleList` of its chunks.
        stage_arguments: See `StageModules`.
        group: The ranks of the pipeline. Where given, and no two stages have a name in common, as with placeholders for
            the layers of other stages, these are the names of the full model, which checkpoints then have.

    Returns:
        The stages, tied as `PipelineSharedModuleWrapper` says; `model` itself if it is such.

    Raises:
        ConfigError: Two parameters of this rank are tied, which are not one object.

    Communication: with `group`, all_gather_object, the names.

    Example:
        >>> import torch
        >>> from colossal.legacy.pipeline import stage_modules_of
        >>> len(stage_modules_of(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)])).chunks)
        2
    """
    if isinstance(model, StageModules):
        return model
    chunks = list(model) if isinstance(model, nn.ModuleList) else [model]
    tied: dict[str, list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(each for chunk in chunks for each in chunk.parameters()):
        if parameter in _TIED:
            tied.setdefault(_TIED[parameter], []).append(parameter)
    has_full_names = all(chunk in _FULL_NAMES for chunk in chunks)
    if group is not None:
        names = [name for chunk in chunks for name in chunk.state_dict()]
        gathered = gather_objects((has_full_names, names, _fingerprint(chunks)), [group])
        of_all = [name for _, held, _ in gathered for name in held]
        has_full_names = all(each for each, _, _ in gathered) or len(set(of_all)) == len(of_all)
        _warn_of_equal_stages([values for _, _, values in gathered])
    return StageModules(chunks, tied=tied, has_full_names=has_full_names, stage_arguments=stage_arguments)


def _fingerprint(chunks: Sequence[nn.Module]) -> list[tuple[str, Any, float | None]]:
    """Names, shapes and sums of parameters; of those that have no values here, no sums."""
    named = [each for chunk in chunks for each in chunk.named_parameters()]
    return [
        (name, tuple(value.shape), value.detach().double().sum().item())
        if type(value) is nn.Parameter and not value.is_meta
        else (name, tuple(value.shape), None)
        for name, value in named
    ]


def _warn_of_equal_stages(stages: Sequence[list[Any]]) -> None:
    """Warn if all stages have the same names and values, as where every rank passes the full model."""
    if len(stages) > 1 and stages[0] and all(stage == stages[0] for stage in stages):
        get_dist_logger().warning(
            "Each rank of a pipeline passes its own stage of the model. Found stages of equal names and values, as if "
            "every rank passed the full model. Partition it, by build_pipeline_model(sequential) or "
            "PipelinableContext.partition.",
            ranks=[0],
        )
