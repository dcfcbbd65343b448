"""Keep one stage of a model of Hugging Face, whose forward method stays as it is.

The forward method still runs from its beginning on every stage, and makes masks and positions of the inputs. Layers of
earlier stages hand over what came from the stage before; the first layer of a later stage ends the forward pass.
"""

import copy
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import nn

from colossal.errors import PlanError
from colossal.pipeline.partition import stage_of_layer
from colossal.pipeline.shared_parameter import SharedParameter
from colossal.tensor import Stages, base_of


class StageEnd(Exception):  # noqa: N818 (it is no error)
    """Ends the forward pass of a stage that is not the last.

    Args:
        carry: The hidden states for the next stage.
    """

    def __init__(self, carry: torch.Tensor) -> None:
        super().__init__()
        self.carry = carry


@final
class Passage:
    """The hidden states that come from the stage before, during a forward pass.

    Attributes:
        carry: The hidden states; None at other times.
        num_shares: Of how many ranks that share sequences the hidden states here are one's.

    Example:
        >>> from colossal.pipeline import Passage
        >>> Passage().carry is None
        True
    """

    def __init__(self) -> None:
        self.carry: Any = None
        self.num_shares = 1

    @property
    def states(self) -> torch.Tensor:
        """What a forward method makes masks and positions of: as long as whole sequences, without a gradient."""
        carry = self.carry.detach()
        if self.num_shares == 1:
            return carry
        return carry[:, :1].expand(-1, carry.shape[1] * self.num_shares, *carry.shape[2:])


def cut(model: nn.Module, stages: Stages, layers: Sequence[range], stage: int) -> tuple[Passage, list[SharedParameter]]:
    """Leave one stage of a model, in place.

    Args:
        model: The whole model.
        stages: What the plan of its family says.
        layers: The layers of each stage.
        stage: The stage that stays.

    Returns:
        Where hidden states enter, and which parameters of the whole model several stages have.

    Raises:
        PlanError: The plan does not fit the model.
    """
    base = base_of(model)
    passage, kept = Passage(), layers[stage]
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    shared = _find_shared(model, prefix, stages, layers)
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        other: Any = model.config
        other.use_cache = False
    held = base.get_submodule(stages.layers)
    assert isinstance(held, nn.ModuleList)
    for index in range(len(held)):
        if index not in kept:
            held[index] = _Before(passage, stages.gives_tuple) if index < kept.start else _After()
    entrances = [name for name in stages.first if _has(base, name)]
    if stage > 0:
        for name in entrances:
            _replace(base, name, _Entrance(base.get_submodule(name), passage, makes_states=name == stages.first[0]))
    if stage < len(layers) - 1:
        _drop_rest(model, {f"{prefix}{name}" for name in (stages.layers, *entrances)})
    return passage, shared


def copy_structure(model: nn.Module) -> nn.Module:
    """Copy the modules of a model, but not its parameters and buffers.

    Args:
        model: The model.

    Returns:
        Modules of their own, that hold the same tensors.

    Example:
        >>> from torch import nn
        >>> from colossal.pipeline import copy_structure
        >>> model = nn.Linear(2, 2)
        >>> copy_structure(model).weight is model.weight
        True
    """
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _without_data(module: nn.Module) -> nn.Module:
    tensors = chain(module.parameters(), module.buffers())
    empty = {id(each): torch.empty(each.shape, dtype=each.dtype, device="meta") for each in tensors}
    return copy.deepcopy(module, empty)


def _has(base: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return isinstance(getattr(base.get_submodule(path), last, None), nn.Module)


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    setattr(root.get_submodule(path), last, module)


def _find_shared(model: nn.Module, prefix: str, stages: Stages, layers: Sequence[range]) -> list[SharedParameter]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for known in names.values():
        by_stage = {stage_of(name.removeprefix(prefix), stages, layers): name for name in reversed(known)}
        if len(by_stage) > 1:
            indices = tuple(sorted(by_stage))
            found.append(SharedParameter(tuple(by_stage[index] for index in indices), indices))
    return found


def stage_of(name: str, stages: Stages, layers: Sequence[range]) -> int:
    """Find the stage that has a parameter.

    Args:
        name: The name of the parameter in the base model, or beside it.
        stages: What the plan of the family says.
        layers: The layers of each stage.

    Returns:
        The index of the stage.
    """
    if name.startswith(f"{stages.layers}."):
        return stage_of_layer(layers, int(name.removeprefix(f"{stages.layers}.").partition(".")[0]))
    return 0 if any(name.startswith(f"{first}.") for first in stages.first) else len(layers) - 1


def _drop_rest(module: nn.Module, kept: Collection[str], path: str = "") -> None:
    """Take everything with parameters away that is not named, nor around something that is."""
    for name, child in list(module.named_children()):
        here = f"{path}{name}"
        if here in kept:
            continue
        if any(each.startswith(f"{here}.") for each in kept):
            _drop_rest(child, kept, f"{here}.")
        elif next(child.parameters(), None) is not None:
            setattr(module, name, _Absent())
    own = next(module.named_parameters(recurse=False), None)
    if own is not None:
        raise PlanError(
            "Everything that belongs to the first stage or to the last is a module of its own. Found the parameter "
            f"{path}{own[0]} of {type(module).__name__}, which is around the layers. Use a plan without stages."
        )


@final
class _Before(nn.Module):
    """In the place of a layer of an earlier stage."""

    def __init__(self, passage: Passage, gives_tuple: bool) -> None:
        super().__init__()
        self._passage, self._gives_tuple = passage, gives_tuple

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        carry = self._passage.carry
        return (carry, None) if self._gives_tuple else carry


@final
class _After(nn.Module):
    """In the place of a layer of a later stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(args[0] if args else kwargs["hidden_states"])


@final
class _Entrance(nn.Module):
    """In the place of what makes hidden states of inputs: they are here already.

    Models look at their embeddings, such as at the dtype of a weight: what it took the place of is asked, without data.
    """

    def __init__(self, native: nn.Module, passage: Passage, makes_states: bool) -> None:
        super().__init__()
        self._passage, self._makes_states = passage, makes_states
        self._native = (_without_data(native),)  # in a tuple, so that it is no child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_native"][0], name)

    def forward(self, *args: Any, **_kwargs: Any) -> torch.Tensor:
        states = self._passage.states
        is_passing = bool(args) and isinstance(args[0], torch.Tensor) and args[0].shape == states.shape
        return states if self._makes_states or is_passing else states.new_zeros(())


@final
class _Absent(nn.Module):
    """In the place of what other stages have."""
