"""Parameters that are one, under several names."""

from collections.abc import Collection, Sequence

from torch import nn

from colossal.errors import PlanError
from colossal.tensor import parameter_names


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Find parameters with several names."""
    return [names for names in parameter_names(model).values() if len(names) > 1]


def retie_parameters(model: nn.Module, ties: Sequence[Sequence[str]], divided: Collection[nn.Module]) -> None:
    """Let parameters be one again, now that some of them are divided."""
    for names in ties:
        places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        chosen = next((getattr(module, last) for module, last in places if module in divided), None)
        if chosen is None:
            continue
        for name, (module, last) in zip(names, places, strict=True):
            found = getattr(module, last)
            if found.shape != chosen.shape and (module in divided or not any(module.children())):
                raise PlanError(
                    f"Parameters that are one are divided alike. Found {tuple(chosen.shape)} and, of {name}, "
                    f"{tuple(found.shape)} on this rank. Give all of {', '.join(names)} a style that divides rows."
                )
            setattr(module, last, chosen)
