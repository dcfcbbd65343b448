"""The specs of a full model and a full optimizer, for ranks that hold only some of their parameters."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.interface.adapter_names import AdapterNames
from colossal._src.tensor import strip_compile_prefix


@final
@dataclass(frozen=True)
class FullModelSpec:
    """Describes the full model, of which this rank has some modules: the `full_spec` of a model that has one."""

    roots: tuple[nn.Module, ...]  # what is here: modules whose state has the names of the full model
    # all names of the full model's state, in its order, each with the first name of the same tensor
    names: Mapping[str, str]
    # the global ranks that have the same modules as this one, or other shards of their tensors
    ranks: tuple[int, ...] = ()
    metadata: Any = None  # the versions of all modules, as torch writes them into a state dict
    config: Any = None  # the configuration as the user wrote it; None without one
    # what the names are in the files of a checkpoint; None for a model without adapters
    adapter_names: AdapterNames | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "FullModelSpec":
        """Record what a full model is, before it is sharded."""
        state: Any = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        values = {strip_compile_prefix(name): value for name, value in state.items()}
        names = {name: first.setdefault(id(value), name) for name, value in values.items()}
        config = copy.deepcopy(getattr(model, "config", None))
        adapter_names = AdapterNames.of(model)
        return cls((model,), names, (), getattr(state, "_metadata", None), config, adapter_names)

    @property
    def groups(self) -> list[list[str]]:
        """All names of each tensor."""
        groups: dict[str, list[str]] = {}
        for name, first in self.names.items():
            groups.setdefault(first, []).append(name)
        return list(groups.values())


def full_spec_of(model: nn.Module) -> FullModelSpec | None:
    """Return the spec of the full model, if a model is only one rank's shards of it."""
    found = getattr(model, "full_spec", None)
    return found if isinstance(found, FullModelSpec) else None


@final
@dataclass(frozen=True)
class Peers:
    """The ranks that have other parameters of the same model, as the other stages of a pipeline have.

    What is reduced over all parameters, such as their norm or whether one of them overflowed, is reduced over these
    ranks as well. No placement of a parameter can say so: a rank may have none.

    Args:
        groups: The process groups.
        device: Where they communicate.

    Example:
        >>> import torch
        >>> from colossal.interface import Peers
        >>> Peers((), torch.device("cpu")).groups
        ()
    """

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device


@final
@dataclass(frozen=True)
class FullOptimizerSpec:
    """Describes the groups of the full optimizer, of whose parameters this rank has some.

    Args:
        groups: The names of the parameters of each group, in order; the first name of those with several.
        ranks: The global ranks that have the same parameters as this one, or other shards of them.

    Example:
        >>> from colossal.interface import FullOptimizerSpec
        >>> FullOptimizerSpec((("embed.weight", "head.weight"), ("head.bias",)), ranks=(2, 3)).ranks
        (2, 3)
    """

    groups: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]
