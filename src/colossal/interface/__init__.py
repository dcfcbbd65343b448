"""What `Booster.boost` hands back: a model and an optimizer with the same verbs under every plugin."""

from colossal.interface.adapters import AdapterNames, active_adapter, base_model_of, is_peft_model
from colossal.interface.elementwise import check_optimizer
from colossal.interface.model import ModelWrapper, innermost
from colossal.interface.nonfinite import NonFiniteCheck
from colossal.interface.optimizer import OptimizerWrapper
from colossal.interface.outline import ModelOutline, OptimizerOutline, Peers, outline_of

__all__ = [
    "AdapterNames",
    "ModelOutline",
    "ModelWrapper",
    "NonFiniteCheck",
    "OptimizerOutline",
    "OptimizerWrapper",
    "Peers",
    "active_adapter",
    "base_model_of",
    "check_optimizer",
    "innermost",
    "is_peft_model",
    "outline_of",
]
