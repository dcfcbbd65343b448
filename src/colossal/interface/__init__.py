"""What `Booster.boost` hands back: a model and an optimizer with the same verbs under every plugin."""

from colossal.interface.model import ModelWrapper, is_peft_model
from colossal.interface.optimizer import OptimizerWrapper

__all__ = ["ModelWrapper", "OptimizerWrapper", "is_peft_model"]
