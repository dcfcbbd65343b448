"""Mixed precision by autocast."""

from typing import ClassVar

import torch
from torch import nn

from colossal._src.amp import Autocast, LossScaler, NoScaler
from colossal._src.booster.mixed_precision.base import MixedPrecision
from colossal._src.interface import Criterion, ModelWrapper, OptimizerWrapper


class AutocastMixedPrecision(MixedPrecision):
    """Runs matrix products and convolutions in half precision; parameters, optimizer state and update in float32.

    Attributes:
        dtype: The half precision.
    """

    dtype: ClassVar[torch.dtype]

    def make_scaler(self, device_type: str) -> LossScaler:  # noqa: ARG002 (for those that scale)
        """Make the scaler of the loss.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``: where the gradients are.

        Returns:
            A scaler that leaves the loss as it is, unless the precision needs another.
        """
        return NoScaler()

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Return the three, ready to run under autocast.

        Args:
            model: The model, on its device.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function.

        Returns:
            Model, optimizer and criterion; what was None stays None.
        """
        device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
        autocast = Autocast(device_type, self.dtype)
        if optimizer is not None:
            optimizer = OptimizerWrapper(optimizer.unwrap(), self.make_scaler(device_type), optimizer.param_names)
        return ModelWrapper(model, autocast.context), optimizer, criterion and autocast.wrap(criterion)
