"""What every mixed precision does."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from colossal._src.amp import Autocast, LossScaler, NoScaler
from colossal._src.interface import Criterion, ModelWrapper, OptimizerWrapper


class MixedPrecision(ABC):
    """Injects a precision into model, optimizer and criterion; the plugin calls it on the model in its place.

    Attributes:
        name: The name of the precision for `Booster` and plugins, such as ``"fp16"``.
        accumulates_locally: Whether gradients of several backward passes may be added up before they are reduced over
            ranks.
        updates_float32: Whether what the optimizer updates is cast to float32 first, since the precision keeps no
            master weights.

    Example:
        >>> from colossal.booster.mixed_precision import MixedPrecision
        >>> from colossal.interface import ModelWrapper
        >>> class FP32(MixedPrecision):
        ...     name = "fp32"
        ...
        ...     def configure(self, model, optimizer=None, criterion=None):
        ...         return ModelWrapper(model), optimizer, criterion
        >>> FP32.name, isinstance(FP32(), MixedPrecision)
        ('fp32', True)
    """

    name: ClassVar[str]
    accumulates_locally: ClassVar[bool] = True
    updates_float32: ClassVar[bool] = False

    def convert(self, model: nn.Module) -> None:  # noqa: B027 (most precisions leave the model as it is)
        """Change the model itself, in place and under the same names, before a plugin shards or wraps it.

        Nothing by default; a precision that needs other layers or parameters does it here.

        Args:
            model: The model, on its device.
        """

    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Return the three, ready to run in this precision.

        Args:
            model: The model, on its device.
            optimizer: The optimizer of the model's parameters, wrapped or not.
            criterion: The loss function.

        Returns:
            Model, optimizer and criterion; what was None stays None.
        """


class AutocastMixedPrecision(MixedPrecision):
    """Runs matrix products and convolutions in half precision; parameters, optimizer state and update in float32.

    Attributes:
        dtype: The half precision.
    """

    updates_float32 = True
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
            optimizer: The optimizer of the model's parameters, wrapped or not.
            criterion: The loss function.

        Returns:
            Model, optimizer and criterion; what was None stays None.
        """
        device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
        autocast = Autocast(device_type, self.dtype)
        wrapped = None
        if optimizer is not None:
            plain: Any = optimizer
            known = plain if isinstance(plain, OptimizerWrapper) else OptimizerWrapper(plain)
            wrapped = OptimizerWrapper(known.unwrap(), self.make_scaler(device_type), known.param_names)
        return ModelWrapper(model, autocast.context), wrapped, criterion and autocast.wrap(criterion)
