"""What `Booster.boost` hands back: a model and an optimizer with the same verbs under every plugin."""

from colossal._src.interface import (
    ModelWrapper,
    OptimizerWrapper,
    get_pretrained_path,
    set_pretrained_path,
)

__all__ = ["ModelWrapper", "OptimizerWrapper", "get_pretrained_path", "set_pretrained_path"]
