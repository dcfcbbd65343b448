"""Half precision with 5 bits of exponent, and a loss scale that makes up for the missing ones."""

from typing import final

import torch

from colossal._src.amp import DynamicScaler, LossScaler, ScalerConfig
from colossal._src.booster.mixed_precision.base import AutocastMixedPrecision


@final
class FP16TorchMixedPrecision(AutocastMixedPrecision):
    """Runs matrix products and convolutions in float16 by autocast, and scales the loss.

    Parameters, optimizer state and the update stay in float32. A step whose gradients overflow is skipped, and the
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
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.mixed_precision import FP16TorchMixedPrecision
        >>> model = torch.nn.Linear(2, 1)
        >>> booster = Booster(device="cpu", mixed_precision=FP16TorchMixedPrecision(init_scale=1024.0))
        >>> model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> optimizer.scale_loss(torch.tensor(0.5)).item()
        512.0
    """

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._scaler = ScalerConfig(init_scale, growth_factor, backoff_factor, growth_interval)

    def make_scaler(self, device_type: str) -> LossScaler:
        """Make the scaler of the loss.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``: where the gradients are.

        Returns:
            A dynamic scaler that follows the rule of this precision.
        """
        return DynamicScaler(self._scaler, device_type)
