"""Half precision with the exponent of float32: no loss scale needed."""

from typing import final

import torch

from colossal._src.booster.mixed_precision.base import AutocastMixedPrecision


@final
class BF16MixedPrecision(AutocastMixedPrecision):
    """Runs matrix products and convolutions in bfloat16 by autocast.

    Parameters, optimizer state and the update stay in float32.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.mixed_precision import BF16MixedPrecision
        >>> model, *_ = Booster(device="cpu", mixed_precision=BF16MixedPrecision()).boost(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).dtype, model.unwrap().weight.dtype
        (torch.bfloat16, torch.float32)
    """

    name = "bf16"
    dtype = torch.bfloat16
