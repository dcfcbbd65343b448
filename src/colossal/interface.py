"""The model and the optimizer that `Booster.boost` returns: the same methods under every plugin."""

from colossal._src.interface import (
    FullOptimizerSpec,
    ModelWrapper,
    NonFiniteCheck,
    OptimizerWrapper,
    Peers,
    TokenWeighting,
    get_pretrained_path,
    set_pretrained_path,
)

__all__ = [
    "FullOptimizerSpec",
    "ModelWrapper",
    "NonFiniteCheck",
    "OptimizerWrapper",
    "Peers",
    "TokenWeighting",
    "get_pretrained_path",
    "set_pretrained_path",
]
