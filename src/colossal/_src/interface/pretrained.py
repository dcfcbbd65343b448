"""Where the weights of a model come from."""

import os

from torch import nn

from colossal._src.interface.model import ModelWrapper, unwrap_compiled
from colossal._src.lazy import pretrained_path, remember_path


def get_pretrained_path(model: nn.Module) -> str | None:
    """Return where the weights of a model come from.

    Args:
        model: The model, or its wrapper.

    Returns:
        The path that was noted; None if there is none. `from_pretrained` in `LazyInitContext` notes the file of the
        weights, or the index of several: what `Booster.load_model` takes.

    Example:
        >>> from torch import nn
        >>> from colossal.interface import get_pretrained_path
        >>> get_pretrained_path(nn.Linear(2, 2)) is None
        True
    """
    return pretrained_path(_own(model))


def set_pretrained_path(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Note where the weights of a model come from.

    Args:
        model: The model, or its wrapper.
        path: The file or folder that holds the weights.

    Example:
        >>> from torch import nn
        >>> from colossal.interface import get_pretrained_path, set_pretrained_path
        >>> model = nn.Linear(2, 2)
        >>> set_pretrained_path(model, "weights/linear")
        >>> get_pretrained_path(model)
        'weights/linear'
    """
    remember_path(_own(model), os.fspath(path))


def _own(model: nn.Module) -> nn.Module:
    found = unwrap_compiled(model)
    return found.unwrap() if isinstance(found, ModelWrapper) else found
