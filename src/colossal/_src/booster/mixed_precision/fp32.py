"""The dtype that the model has."""

from typing import final

from torch import nn

from colossal._src.booster.mixed_precision.base import MixedPrecision
from colossal._src.interface import Criterion, ModelWrapper, OptimizerWrapper


@final
class FP32MixedPrecision(MixedPrecision):
    """Leaves everything in the dtype that the model has, usually float32: what a `Booster` without a precision does.

    Under a plugin with a precision of its own it takes the place of the plugin's default, which is fp16.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.mixed_precision import FP32MixedPrecision
        >>> model, *_ = Booster(device="cpu", mixed_precision=FP32MixedPrecision()).boost(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).dtype
        torch.float32
    """

    name = "fp32"

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Return the three as they are.

        Args:
            model: The model, on its device.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function.

        Returns:
            Model, optimizer and criterion.
        """
        return ModelWrapper(model), optimizer, criterion
