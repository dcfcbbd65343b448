"""Models that are a sequence: modules that run one after the other, and functions between them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, final

from torch import nn

from colossal._src.pipeline.partition import stage_of_layer
from colossal._src.pipeline.schedule.stage_placement import SharedParameter
from colossal.errors import ConfigError, PlanError

Step = str | Callable[[Any], Any] | tuple[Callable[[Any], Any], str]
"""The name of a module, a function, or a function and whether it stays with the previous or the next module."""

_PLACES = ("front", "behind")


class _Unit(NamedTuple):
    """A module by its name, and the functions that run with it."""

    name: str
    before: tuple[Callable[[Any], Any], ...]
    after: tuple[Callable[[Any], Any], ...]


@final
class ExecutionSequence(nn.Module):
    """A custom model as a sequence, defined by the names of its modules in the order in which they run.

    It runs the steps in place of the forward method of the model, and a pipeline can split it between any two of its
    modules as it splits a `torch.nn.Sequential`. Parameters keep the names that they have in the model. A module may
    be named several times; all its uses then have the same parameters.

    Args:
        model: The model; its modules are taken over, not copied.
        steps: What happens to the input, one after the other. A string names a module, with dots for one within
            another; a function is applied between modules. ``(function, "front")`` stays on the stage of the module
            that follows, ``(function, "behind")`` on that of the previous module, and so does a plain function.

    Raises:
        ConfigError: A step is none of these, or names what the model does not have.
        PlanError: No step names a module that has parameters.

    Example:
        >>> import torch
        >>> from colossal.pipeline import ExecutionSequence
        >>> model = torch.nn.Module()
        >>> model.conv, model.fc = torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(8, 3)
        >>> sequence = ExecutionSequence(model, ["conv", torch.relu, (lambda x: x.flatten(1), "behind"), "fc"])
        >>> sequence(torch.ones(5, 1, 4, 4)).shape, len(sequence), [name for name, _ in sequence.named_parameters()]
        (torch.Size([5, 3]), 2, ['conv.weight', 'conv.bias', 'fc.weight', 'fc.bias'])
    """

    def __init__(self, model: nn.Module, steps: Sequence[Step]) -> None:
        super().__init__()
        self._units = tuple(_units_of(model, steps))
        for name, module in model.named_modules(remove_duplicate=False):
            if name and "." not in name:
                self.add_module(name, module)
        named = tuple(f"{unit.name}." for unit in self._units)
        left = [name for name, _ in model.named_parameters(remove_duplicate=False) if not name.startswith(named)]
        if left:
            raise PlanError(
                "The steps of a sequence name every module that has parameters. Found no step for "
                f"{', '.join(left[:5])} of {type(model).__name__}. Name their modules, or leave these out of the model."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules, in the order in which they run."""
        return tuple(unit.name for unit in self._units)

    def __len__(self) -> int:
        """Count the modules that run, which are partitioned into stages."""
        return len(self._units)

    def forward(self, x: Any) -> Any:
        """Run the modules and functions one after the other.

        Args:
            x: The input of the first.

        Returns:
            What the last returns.
        """
        for unit in self._units:
            for function in (*unit.before, self.get_submodule(unit.name), *unit.after):
                x = function(x)
        return x

    def keep(self, kept: range) -> None:
        """Leave some of the modules, in place.

        Args:
            kept: Which of them.
        """
        self._units = tuple(self._units[index] for index in kept)


def is_layer_sequence(model: nn.Module) -> TypeGuard[nn.Sequential | ExecutionSequence]:
    """Whether a model runs its modules one after the other, so that it can be split between any two of them."""
    if isinstance(model, nn.Sequential):
        # A subclass with its own forward may do anything between its modules.
        return type(model).forward is nn.Sequential.forward and "forward" not in vars(model)
    return isinstance(model, ExecutionSequence)


def unit_names(model: nn.Sequential | ExecutionSequence) -> tuple[str, ...]:
    """Find the names of the modules of a sequence."""
    if isinstance(model, ExecutionSequence):
        return model.names
    return tuple(name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name)


def extract_sequence_stage(
    model: nn.Sequential | ExecutionSequence, layers: Sequence[range], stage: int
) -> list[SharedParameter]:
    """Leave one stage of a sequence, in place."""
    names, shared = unit_names(model), list(_find_shared(model, layers))
    kept = {names[position] for position in layers[stage]}
    # Once for each name, as a module may run several times; replaced, so that the names of the others stay.
    for name in dict.fromkeys(names):
        if name not in kept:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Identity())
    if isinstance(model, ExecutionSequence):
        model.keep(layers[stage])
    return shared


def _find_shared(model: nn.Sequential | ExecutionSequence, layers: Sequence[range]) -> Iterator[SharedParameter]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    units = unit_names(model)
    for known in names.values():
        by_stage: dict[int, str] = {}
        for name in known:
            for position, unit in enumerate(units):
                if name.startswith(f"{unit}."):
                    by_stage.setdefault(stage_of_layer(layers, position), name)
        if len(by_stage) > 1:
            stages = tuple(sorted(by_stage))
            yield SharedParameter(tuple(by_stage[stage] for stage in stages), stages)


def _units_of(model: nn.Module, steps: Sequence[Step]) -> Iterator[_Unit]:
    known = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    waiting: list[Callable[[Any], Any]] = []
    unit: _Unit | None = None
    for step in steps:
        if isinstance(step, str):
            if step not in known:
                raise _wrong(step, f"{type(model).__name__} has {', '.join(sorted(known))}", "Name one of these")
            if unit is not None:
                yield unit
            unit, waiting = _Unit(step, tuple(waiting), ()), []
            continue
        function, place = step if isinstance(step, tuple) else (step, "behind" if unit else "front")
        if isinstance(function, nn.Module) or not callable(function) or place not in _PLACES:
            raise _wrong(
                step,
                "a function must not be a module, and goes with 'front' or 'behind'",
                "Name the module, or pass (function, 'front')",
            )
        if place == "front":
            waiting.append(function)
        elif unit is None or waiting:
            raise _wrong(
                step, "there is no module before it that it could stay with", "Put it behind a name, or pass 'front'"
            )
        else:
            unit = unit._replace(after=(*unit.after, function))
    if unit is None or waiting:
        raise _wrong(steps[-1] if steps else steps, "no module follows", "Name one at the end, or pass 'behind'")
    yield unit


def _wrong(step: Any, reason: str, advice: str) -> ConfigError:
    return ConfigError(
        "A step of a sequence is the name of a module, a function, or a function with 'front' or 'behind'. Found "
        f"{step!r}, but {reason}. {advice}."
    )
