"""What the parameters of a model are called."""

from torch import nn


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Find all names of the parameters of a model, of which several may be one parameter.

    Args:
        model: The model.

    Returns:
        The names of each, in the order of the model.

    Example:
        >>> from torch import nn
        >>> from colossal._src.tensor import parameter_names
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> list(parameter_names(nn.Sequential(layer, layer)).values())
        [['0.weight', '1.weight']]
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(strip_compile_prefix(name))
    return names


def strip_compile_prefix(name: str) -> str:
    """Leave out of a name what `torch.compile` adds to those of the modules that it wraps.

    Args:
        name: The name of a parameter or buffer.

    Returns:
        Its name in the model that is not compiled.

    Example:
        >>> from colossal._src.tensor import strip_compile_prefix
        >>> strip_compile_prefix("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    return name.replace("_orig_mod.", "")
