"""Half precision with the exponent of float32: no loss scale needed."""

from typing import final

import torch
from torch import nn

from colossal.amp import Autocast
from colossal.booster.mixed_precision.base import Criterion, MixedPrecision
from colossal.booster.mixed_precision.fp16_torch import device_type_of
from colossal.interface import ModelWrapper, OptimizerWrapper


@final
class BF16MixedPrecision(MixedPrecision):
    """Runs matrix products and convolutions in bfloat16 by autocast.

    Parameters, optimizer state and the update stay in float32.

    Example:
        >>> from colossal.booster import Booster
        >>> from colossal.booster.mixed_precision import BF16MixedPrecision
        >>> booster = Booster(mixed_precision=BF16MixedPrecision())
    """

    name = "bf16"

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Return the three, ready to run in bfloat16.

        Args:
            model: The model, on its device.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function.

        Returns:
            Model, optimizer and criterion; what was None stays None.
        """
        autocast = Autocast(device_type_of(model), torch.bfloat16)
        return ModelWrapper(model, autocast.context), optimizer, criterion and autocast.wrap(criterion)
