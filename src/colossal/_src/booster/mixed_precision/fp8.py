"""Linear layers in 8-bit floating point, the rest in bfloat16."""

from typing import final

import torch
from torch import nn

from colossal._src.amp import SIZE_MULTIPLE, FP8Linear, has_float8, has_fp8_sizes
from colossal._src.booster.mixed_precision.base import AutocastMixedPrecision
from colossal.accelerator import get_current_device
from colossal.errors import UnsupportedError
from colossal.logging import get_dist_logger


@final
class FP8MixedPrecision(AutocastMixedPrecision):
    """Multiplies in float8 in every linear layer whose sizes are multiples of 16, and runs the rest in bfloat16.

    Inputs and weights are rounded to `torch.float8_e4m3fn`, gradients to `torch.float8_e5m2`, each tensor relative to
    its own largest element. Parameters, optimizer state and the update stay in float32, as in bf16 by autocast. The
    layers are `torch.nn.Linear` modules of the model that become `FP8Linear` in place: names and state dicts do not
    change. Subclasses of `torch.nn.Linear` are not changed.

    On GPUs of compute capability 8.9 and above (Ada, Hopper and later) their 8-bit units compute. Elsewhere the
    numbers are the same and the time is not: products of rounded tensors in float32. A line of the log says so.

    Raises:
        UnsupportedError: In `boost`: the model has no such layer.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433.

    Example:
        >>> import torch
        >>> from colossal.booster import Booster
        >>> from colossal.booster.mixed_precision import FP8MixedPrecision
        >>> from colossal.logging import get_dist_logger
        >>> get_dist_logger().set_level("WARNING")
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 3))
        >>> model, *_ = Booster(device="cpu", mixed_precision=FP8MixedPrecision()).boost(model)
        >>> [type(layer).__name__ for layer in model.unwrap()], model(torch.ones(4, 32)).dtype
        (['FP8Linear', 'Linear'], torch.bfloat16)
        >>> get_dist_logger().set_level("INFO")
    """

    name = "fp8"
    dtype = torch.bfloat16

    def convert(self, model: nn.Module) -> None:
        """Turn the linear layers of a model into float8 ones, in place.

        Args:
            model: The model, on its device.

        Raises:
            UnsupportedError: There is no linear layer with fitting sizes.
        """
        linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and type(module) in {nn.Linear, FP8Linear}
        }
        fitting = [linear for linear in linears.values() if has_fp8_sizes(linear)]
        others = [
            f"{name or 'itself'} ({linear.in_features} x {linear.out_features})"
            for name, linear in linears.items()
            if not has_fp8_sizes(linear)
        ]
        sizes = f"not multiples of {SIZE_MULTIPLE}: {', '.join(others)}"
        if not fitting:
            raise UnsupportedError(
                f"mixed_precision='fp8' needs torch.nn.Linear layers whose sizes are multiples of {SIZE_MULTIPLE}. "
                f"Found none in {type(model).__name__}"
                + (f"; sizes {sizes}. " if others else ". ")
                + "Pass 'bf16' instead."
            )
        for linear in fitting:
            # keeps the object, so that hooks and tied weights stay as they are
            linear.__class__ = FP8Linear
        message = f"fp8: {len(fitting)} of {len(linears)} linear layers multiply in float8"
        message += f", the others in bfloat16 because their sizes are {sizes}" if others else ""
        device = get_current_device()  # where the model goes; its weights may be on the host, or lazy, yet
        if not has_float8(device):
            message += f"; emulated, because {device.type} devices here have no float8 units"
        get_dist_logger().info(message, ranks=[0])
