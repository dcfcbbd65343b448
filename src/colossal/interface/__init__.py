"""What `Booster.boost` hands back: a model and an optimizer with the same verbs under every plugin."""

from colossal.interface.model import ModelWrapper, innermost, is_peft_model
from colossal.interface.optimizer import OptimizerWrapper

__all__ = ["ModelWrapper", "OptimizerWrapper", "innermost", "is_peft_model"]
