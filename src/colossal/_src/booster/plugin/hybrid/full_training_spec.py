"""What ranks remember of a full model and its optimizer, so that checkpoints are those of one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final

from torch import nn
from torch.optim import Optimizer

from colossal._src.booster.plugin.hybrid.stage_adapters import AdapterSpec
from colossal._src.booster.plugin.hybrid.stage_sharding import parameters_of
from colossal._src.cluster import AXES, Axis, ParallelMesh
from colossal._src.comm import gather_objects
from colossal._src.interface import FullModelSpec, FullOptimizerSpec
from colossal._src.pipeline import FullOutline, Stage, StageModules, StagePlacement
from colossal._src.tensor import parameter_names
from colossal.errors import ConfigError


@final
@dataclass(frozen=True)
class FullTrainingSpec:
    """The names of a full model and of the groups of its optimizer, before they are sharded."""

    names: dict[nn.Parameter, list[str]]  # all names of each parameter
    full_spec: FullModelSpec  # what the state of the model holds
    groups: tuple[tuple[str, ...], ...]  # the names of the parameters of each group of the optimizer
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict[str, AdapterSpec])  # its low-rank ones, by name
    outline: FullOutline | None = None  # of a model whose stages the user built; None for one that is partitioned

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None) -> Self:
        """Look at them."""
        names = parameter_names(model)
        groups = [] if optimizer is None else optimizer.param_groups
        held = tuple(tuple(names[parameter][0] for parameter in group["params"]) for group in groups)
        return cls(names, FullModelSpec.of(model), held, AdapterSpec.of_all(model))

    @classmethod
    def of_stage_modules(
        cls, model: StageModules, optimizer: Optimizer | None, placement: StagePlacement, mesh: ParallelMesh
    ) -> Self:
        """Exchange with the other ranks of the pipeline what each of them has.

        Communication: all_gather_object, pp, of all names.
        """
        outline = model.outline(placement, mesh)
        names = outline.names_of(model.to_stages(outline, mesh.rank("pp")))
        groups = [] if optimizer is None else optimizer.param_groups
        own = [[names[parameter][0] for parameter in group["params"]] for group in groups]
        ranks = gather_objects(own, [mesh.group("pp")])
        spec = FullModelSpec((model,), outline.state, metadata=outline.metadata)
        return cls(names, spec, _merge_groups(ranks, outline), outline=outline)

    def model_spec_of_stages(self, stages: Sequence[Stage], mesh: ParallelMesh) -> FullModelSpec:
        """Return what the full model of these stages was."""
        return replace(
            self.full_spec, roots=tuple(stage.module for stage in stages), ranks=_ranks_with_same_stages(mesh)
        )

    def names_of(self, stages: Sequence[Stage]) -> dict[nn.Parameter, str]:
        """Return the names of this rank's parameters in the full model."""
        first = {name: names[0] for names in self.names.values() for name in names}
        return {parameter: first[name] for name, parameter in parameters_of(stages).items()}

    def optimizer_spec(self, mesh: ParallelMesh) -> FullOptimizerSpec:
        """Return which parameters the stages of other ranks have in the optimizer."""
        return FullOptimizerSpec(self.groups, _ranks_with_same_stages(mesh))


def _merge_groups(ranks: Sequence[Sequence[Sequence[str]]], outline: FullOutline) -> tuple[tuple[str, ...], ...]:
    """Merge the groups of all ranks' optimizers, in the order of the full model's parameters."""
    merged = [dict.fromkeys(name for group in groups for name in group) for groups in zip(*ranks, strict=True)]
    for name in outline.parameters:
        numbers = [number for number, group in enumerate(merged) if name in group]
        if len(numbers) > 1:
            raise ConfigError(
                "A tied parameter is in the same group of the optimizer on all ranks. Found "
                f"{' = '.join(outline.parameters[name])} in the groups {numbers}. Put it into one of them everywhere."
            )
    return tuple(tuple(name for name in outline.parameters if name in group) for group in merged)


def _ranks_with_same_stages(mesh: ParallelMesh) -> tuple[int, ...]:
    """The ranks that have the same stages."""
    axes: list[Axis] = [axis for axis in AXES if axis != "pp"]
    return mesh.ranks(*axes)
