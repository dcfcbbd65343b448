"""The model and the optimizer that `Booster.boost` returns: the same methods under every plugin."""

from colossal._src.interface import (
    ModelWrapper,
    OptimizerWrapper,
    get_pretrained_path,
    set_pretrained_path,
)

__all__ = ["ModelWrapper", "OptimizerWrapper", "get_pretrained_path", "set_pretrained_path"]
