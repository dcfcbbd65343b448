"""Half precision with 5 bits of exponent, and a loss scale that makes up for the missing ones."""

from typing import final

import torch
from torch import nn

from colossal.amp import Autocast, DynamicScaler, ScalerConfig
from colossal.booster.mixed_precision.base import Criterion, MixedPrecision
from colossal.interface import ModelWrapper, OptimizerWrapper


@final
class FP16TorchMixedPrecision(MixedPrecision):
    """Runs matrix products and convolutions in float16 by autocast, and scales the loss.

    Parameters, optimizer state and the update stay in float32. A step whose gradients overflow is dropped, and the
    scale shrinks. On most CPUs float16 is correct but slow: prefer ``"bf16"`` there.

    Args:
        init_scale: First loss scale; greater than 0.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after an overflow; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.

    Raises:
        ConfigError: A value is outside its range.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740.

    Example:
        >>> from colossal.booster import Booster
        >>> from colossal.booster.mixed_precision import FP16TorchMixedPrecision
        >>> booster = Booster(mixed_precision=FP16TorchMixedPrecision(init_scale=2.0**10))
    """

    name = "fp16"

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._scaler = ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval)

    def configure(
        self, model: nn.Module, optimizer: OptimizerWrapper | None = None, criterion: Criterion | None = None
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Criterion | None]:
        """Return the three, ready to run in float16 with a scaled loss.

        Args:
            model: The model, on its device.
            optimizer: The optimizer of the model's parameters.
            criterion: The loss function.

        Returns:
            Model, optimizer and criterion; what was None stays None.
        """
        device_type = device_type_of(model)
        autocast = Autocast(device_type, torch.float16)
        if optimizer is not None:
            scaler = DynamicScaler(self._scaler, device_type)
            optimizer = OptimizerWrapper(optimizer.unwrap(), scaler, optimizer.param_names)
        return ModelWrapper(model, autocast.context), optimizer, criterion and autocast.wrap(criterion)


def device_type_of(model: nn.Module) -> str:
    """Return the device type of the model's first parameter; ``"cpu"`` for a model without any."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")
