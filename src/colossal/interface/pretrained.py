"""Where the weights of a model come from."""

import os

from torch import nn

from colossal.interface.model import ModelWrapper
from colossal.lazy.pretrained import pretrained_path, remember_path


def get_pretrained_path(model: nn.Module) -> str | None:
    """Tell where the weights of a model come from.

    Args:
        model: Any model, boosted or not.

    Returns:
        What `from_pretrained` was given when the model was built inside of `LazyInitContext`, or
        `set_pretrained_path` since; None for other models.

    Example:
        >>> import torch
        >>> from colossal.interface.pretrained import get_pretrained_path, set_pretrained_path
        >>> model = torch.nn.Linear(2, 3)
        >>> set_pretrained_path(model, "checkpoints/small")
        >>> get_pretrained_path(model)
        'checkpoints/small'
    """
    return pretrained_path(_own(model))


def set_pretrained_path(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Note where the weights of a model come from.

    Args:
        model: Any model, boosted or not.
        path: A folder, or a name on a hub.

    Example:
        >>> import torch
        >>> from colossal.interface.pretrained import get_pretrained_path, set_pretrained_path
        >>> model = torch.nn.Linear(2, 3)
        >>> get_pretrained_path(model) is None
        True
        >>> set_pretrained_path(model, "checkpoints/small")
        >>> get_pretrained_path(model)
        'checkpoints/small'
    """
    remember_path(_own(model), os.fspath(path))


def _own(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model
