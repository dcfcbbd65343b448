"""All names of the parameters of a model."""

from torch import nn


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Find all names of the parameters of a model, of which several may be one parameter.

    Args:
        model: The model.

    Returns:
        The names of each, in the order of the model.

    Example:
        >>> from torch import nn
        >>> from colossal.tensor import parameter_names
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> list(parameter_names(nn.Sequential(layer, layer)).values())
        [['0.weight', '1.weight']]
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names
