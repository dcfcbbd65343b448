"""The documented base classes of optimizers that train half-precision parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.amp import DynamicScaler, LossScaler, MasterWeights, NoScaler, ScalerConfig
from colossal._src.comm import all_reduce_over
from colossal._src.interface import OptimizerWrapper
from colossal.accelerator import get_current_device
from colossal.errors import ConfigError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class MixedPrecisionMixin(ABC):
    """When an optimizer of half-precision parameters scales the loss, and when it skips a step.

    Attributes:
        dtype: The half precision of the parameters.

    Example:
        >>> from colossal.legacy.amp import BF16MixedPrecisionMixin, MixedPrecisionMixin
        >>> isinstance(BF16MixedPrecisionMixin(), MixedPrecisionMixin)
        True
    """

    dtype: torch.dtype

    @abstractmethod
    def pre_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss before its backward pass.

        Args:
            loss: A scalar.

        Returns:
            What the backward pass starts from.
        """

    def pre_backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Look at a gradient from which a backward pass continues; it is scaled already.

        Args:
            tensor: Any tensor of the graph.
            grad: Its gradient, of the same shape.

        Returns:
            The gradient to continue from.
        """
        return grad

    @abstractmethod
    def should_skip_step(self) -> bool:
        """Decide whether the gradients overflowed, and move the scale.

        Returns:
            Whether to skip the step; the same on all ranks.

        Communication: all_reduce, all ranks, 4 bytes, where the loss is scaled.
        """

    def pre_zero_grad(self) -> None:  # noqa: B027 (nothing has to be done)
        """Prepare for gradients that are discarded; nothing by default."""

    @abstractmethod
    def get_grad_div_scale(self) -> float:
        """Return what the gradients have to be divided by.

        Returns:
            The loss scale of their backward pass.
        """


class FP16MixedPrecisionMixin(MixedPrecisionMixin):
    """Scales the loss by a dynamic scale, and skips a step whose gradients overflowed on some rank.

    A subclass says what this rank found.

    Attributes:
        grad_scaler: The dynamic loss scaler.

    Args:
        initial_scale: First loss scale; greater than 0.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow; greater than 1.
        backoff_factor: Factor of the scale after overflows; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.

    Raises:
        ConfigError: A value is outside its range.

    Example:
        >>> from colossal.legacy.amp import FP16MixedPrecisionMixin
        >>> class Overflowed(FP16MixedPrecisionMixin):
        ...     def check_local_overflow(self):
        ...         return True
        >>> mixin = Overflowed(initial_scale=1024.0, hysteresis=1)
        >>> mixin.should_skip_step(), mixin.get_grad_div_scale()
        (True, 512.0)
    """

    dtype = torch.float16

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
    ) -> None:
        super().__init__()
        rule = ScalerConfig(
            initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
        )
        self.grad_scaler = DynamicScaler(rule, get_current_device().type)

    @property
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied by."""
        return self.grad_scaler.scale_value

    @abstractmethod
    def check_local_overflow(self) -> bool:
        """Look for an infinite or NaN gradient of this rank.

        Returns:
            Whether there is one.
        """

    def pre_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale.

        Args:
            loss: A scalar.

        Returns:
            The scaled loss.
        """
        return self.grad_scaler.scale(loss)

    def should_skip_step(self) -> bool:
        """Decide whether the gradients of any rank overflowed, and move the scale.

        Returns:
            Whether to skip the step; the same on all ranks.

        Communication: all_reduce, all ranks, 4 bytes.
        """
        overflow = torch.tensor(float(self.check_local_overflow()), device=get_current_device())
        if dist.group.WORLD is not None:
            overflow = all_reduce_over(overflow, [dist.group.WORLD], "max")
        skip = bool(overflow > 0)
        self.grad_scaler.overflow_from_norm(torch.tensor(float("inf") if skip else 0.0, device="cpu"))
        self.grad_scaler.discard()
        return skip

    def get_grad_div_scale(self) -> float:
        """Return what the gradients have to be divided by.

        Returns:
            The loss scale.
        """
        return self.loss_scale


@final
class BF16MixedPrecisionMixin(MixedPrecisionMixin):
    """Leaves the loss as it is and skips no step: bfloat16 has the range of float32.

    Example:
        >>> from colossal.legacy.amp import BF16MixedPrecisionMixin
        >>> BF16MixedPrecisionMixin().should_skip_step()
        False
    """

    dtype = torch.bfloat16

    def pre_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Leave a loss as it is.

        Args:
            loss: A scalar.

        Returns:
            The loss.
        """
        return loss

    def should_skip_step(self) -> bool:
        """Skip no step.

        Returns:
            False.
        """
        return False

    def get_grad_div_scale(self) -> float:
        """Divide by nothing.

        Returns:
            The number one.
        """
        return 1.0


class MixedPrecisionOptimizer(OptimizerWrapper):
    """Trains half-precision parameters by float32 master weights, with a loss scale where they are float16.

    Args:
        optim: The optimizer of the model's parameters; those of the given precision get master weights.
        precision: ``"fp16"`` or ``"bf16"``: what the model has been cast to.
        initial_scale: First loss scale; as those that follow, for ``"fp16"``.
        min_scale: The scale does not fall below it.
        growth_factor: Factor of the scale after `growth_interval` steps without an overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without an overflow after which the scale grows.
        hysteresis: Number of overflows since the scale last grew that it takes until it falls.
        max_scale: The scale does not grow above it.
        max_norm: Clip the common norm of the gradients to it before each step; 0 does not.

    Raises:
        ConfigError: A value is outside its range, or no parameter has the precision.

    Example:
        >>> import torch
        >>> from colossal.legacy.amp import MixedPrecisionOptimizer
        >>> model = torch.nn.Linear(2, 1).bfloat16()
        >>> optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
        >>> optimizer.backward(model(torch.ones(3, 2, dtype=torch.bfloat16)).sum())
        >>> optimizer.step()
        >>> optimizer.parameters[0].dtype, model.weight.dtype
        (torch.float32, torch.bfloat16)
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        precision: str = "fp16",
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
    ) -> None:
        if precision not in _DTYPES:
            raise ConfigError(
                f"A MixedPrecisionOptimizer has a precision of fp16 or bf16. Found {precision!r}. Pass one of them; in "
                "float32 use the optimizer itself."
            )
        half = [parameter for parameter in _parameters_of(optim) if parameter.dtype == _DTYPES[precision]]
        if not half:
            found = ", ".join(sorted({str(parameter.dtype) for parameter in _parameters_of(optim)}))
            raise ConfigError(
                f"A MixedPrecisionOptimizer of precision {precision!r} needs parameters in {_DTYPES[precision]}. Found "
                f"{found or 'none'}. Cast the model before its optimizer is wrapped: model.to({_DTYPES[precision]})."
            )
        rule = ScalerConfig(
            initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
        )
        scaler: LossScaler = NoScaler() if precision == "bf16" else DynamicScaler(rule, half[0].device.type)
        masters = MasterWeights(optim, half, _DTYPES[precision])
        super().__init__(optim, scaler, masters=masters, max_norm=max_norm)


def _parameters_of(optim: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optim.param_groups for parameter in group["params"])
