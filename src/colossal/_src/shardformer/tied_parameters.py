"""Tied parameters: one object under several names."""

from collections.abc import Collection, Sequence

from torch import nn

from colossal._src.tensor import parameter_names
from colossal.errors import PlanError


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Find parameters with several names."""
    return [names for names in parameter_names(model).values() if len(names) > 1]


def retie_parameters(model: nn.Module, ties: Sequence[Sequence[str]], sharded: Collection[nn.Module]) -> None:
    """Tie parameters again, after some of them were sharded."""
    for names in ties:
        places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        chosen = next((getattr(module, last) for module, last in places if module in sharded), None)
        if chosen is None:
            continue
        for name, (module, last) in zip(names, places, strict=True):
            found = getattr(module, last)
            if found.shape != chosen.shape and (module in sharded or not any(module.children())):
                raise PlanError(
                    f"Tied parameters are sharded in the same way. Found {tuple(chosen.shape)} and, of {name}, "
                    f"{tuple(found.shape)} on this rank. Give all of {', '.join(names)} a style that shards rows."
                )
            setattr(module, last, chosen)
