"""Where the weights of a model come from."""

import os

from torch import nn

from colossal._src.interface.model import ModelWrapper
from colossal._src.lazy import pretrained_path, remember_path


def get_pretrained_path(model: nn.Module) -> str | None:
    """Return where the weights of a model come from."""
    return pretrained_path(_own(model))


def set_pretrained_path(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Note where the weights of a model come from."""
    remember_path(_own(model), os.fspath(path))


def _own(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model
