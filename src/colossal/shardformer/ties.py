"""Parameters that are one, under several names."""

from collections.abc import Collection, Sequence

from torch import nn

from colossal.errors import PlanError
from colossal.tensor import parameter_names


def find_ties(model: nn.Module) -> list[list[str]]:
    """Find parameters with several names.

    Args:
        model: The model.

    Returns:
        The names of each.

    Example:
        >>> from torch import nn
        >>> from colossal.shardformer.ties import find_ties
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> find_ties(nn.Sequential(layer, layer))
        [['0.weight', '1.weight']]
    """
    return [names for names in parameter_names(model).values() if len(names) > 1]


def tie_again(model: nn.Module, ties: Sequence[Sequence[str]], divided: Collection[nn.Module]) -> None:
    """Let parameters be one again, now that some of them are divided.

    Args:
        model: The model.
        ties: What `find_ties` found before.
        divided: The modules that took the place of others. What a module without a computation of its own names, such
            as a head that holds the bias of its last layer, follows them.

    Raises:
        PlanError: They are divided in two ways, or one of them is not divided.

    Example:
        >>> from torch import nn
        >>> from colossal.shardformer.ties import tie_again
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> tie_again(model, [["0.weight", "1.weight"]], set(model))
        >>> model[0].weight is model[1].weight
        True
    """
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
