"""What `Booster.boost` hands back: a model and an optimizer with the same verbs under every plugin."""

from colossal.interface.elementwise import check_optimizer
from colossal.interface.model import ModelWrapper, innermost, is_peft_model
from colossal.interface.nonfinite import NonFiniteCheck
from colossal.interface.optimizer import OptimizerWrapper
from colossal.interface.outline import ModelOutline, OptimizerOutline, Peers, outline_of

__all__ = [
    "ModelOutline",
    "ModelWrapper",
    "NonFiniteCheck",
    "OptimizerOutline",
    "OptimizerWrapper",
    "Peers",
    "check_optimizer",
    "innermost",
    "is_peft_model",
    "outline_of",
]
