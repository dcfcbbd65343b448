"""What `Booster.boost` hands back: a model and an optimizer with the same verbs under every plugin."""

import importlib
from typing import TYPE_CHECKING

from colossal.interface.adapters import AdapterNames, active_adapter, base_model_of, is_peft_model
from colossal.interface.elementwise import check_optimizer
from colossal.interface.model import ModelWrapper, innermost
from colossal.interface.nonfinite import NonFiniteCheck
from colossal.interface.optimizer import OptimizerWrapper
from colossal.interface.outline import ModelOutline, OptimizerOutline, Peers, outline_of

if TYPE_CHECKING:
    from colossal.interface.token_weighting import TokenWeighting

__all__ = [
    "AdapterNames",
    "ModelOutline",
    "ModelWrapper",
    "NonFiniteCheck",
    "OptimizerOutline",
    "OptimizerWrapper",
    "Peers",
    "TokenWeighting",
    "active_adapter",
    "base_model_of",
    "check_optimizer",
    "innermost",
    "is_peft_model",
    "outline_of",
]


_HOMES = {"TokenWeighting": "colossal.interface.token_weighting"}  # which few programs need


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'colossal.interface' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
