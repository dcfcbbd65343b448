"""Loss scaling: keeps small half-precision gradients from vanishing, and drops steps whose gradients overflowed.

Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from colossal.errors import ConfigError


@final
@dataclass(frozen=True)
class ScalerConfig:
    """The rule by which the loss scale moves.

    Args:
        init_scale: First scale; greater than 0.
        growth_factor: Factor after `growth_interval` steps in a row without an overflow; greater than 1.
        backoff_factor: Factor after a step that overflowed; between 0 and 1.
        growth_interval: Number of steps without an overflow after which the scale grows; at least 1.

    Raises:
        ConfigError: A value is outside its range.

    Example:
        >>> from colossal.amp import ScalerConfig
        >>> ScalerConfig(init_scale=1024.0).backoff_factor
        0.5
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        rules = (
            ("init_scale", "greater than 0", self.init_scale > 0),
            ("growth_factor", "greater than 1", self.growth_factor > 1),
            ("backoff_factor", "between 0 and 1", 0 < self.backoff_factor < 1),
            ("growth_interval", "at least 1", self.growth_interval >= 1),
        )
        for name, range_, holds in rules:
            if not holds:
                raise ConfigError(
                    f"A loss scaler needs {name} {range_}. Found {name}={getattr(self, name)}. "
                    f"The default is {name}={type(self).__dataclass_fields__[name].default}."
                )


class LossScaler(ABC):
    """What an optimizer wrapper asks of a loss scaler, in the order of a step: scale, unscale, step.

    Example:
        >>> import torch
        >>> from colossal.amp import LossScaler, NoScaler
        >>> from colossal.interface import OptimizerWrapper
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        >>> isinstance(OptimizerWrapper(optimizer, scaler=NoScaler()).scaler, LossScaler)
        True
    """

    @property
    @abstractmethod
    def scale_value(self) -> float:
        """The factor that the next loss is multiplied by."""

    @property
    @abstractmethod
    def dropped(self) -> bool:
        """Whether the last step was dropped because a gradient was infinite or NaN."""

    @abstractmethod
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale.

        Args:
            loss: Any shape.

        Returns:
            The scaled loss; same shape.
        """

    @abstractmethod
    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once for each step however often it is called.

        Args:
            optimizer: Holds the parameters whose gradients are divided.
        """

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer unless a gradient is infinite or NaN; then move the scale.

        Args:
            optimizer: The optimizer.
            *args: Passed to its step.
            **kwargs: Passed to its step.

        Returns:
            What the optimizer's own step returns, or None for a step that was dropped.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget that gradients were unscaled: they are thrown away without a step."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Collect the state.

        Returns:
            Plain numbers by name.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Args:
            state: What `state_dict` returned.
        """


@final
class NoScaler(LossScaler):
    """Leaves loss and gradients as they are: for float32 and bfloat16, whose range needs no help.

    Example:
        >>> import torch
        >>> from colossal.amp import NoScaler
        >>> NoScaler().scale(torch.tensor(3.0)).item()
        3.0
    """

    @property
    def scale_value(self) -> float:
        """Always 1."""
        return 1.0

    @property
    def dropped(self) -> bool:
        """Always False."""
        return False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Leave a loss as it is.

        Args:
            loss: Any shape.

        Returns:
            `loss` itself.
        """
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing.

        Args:
            optimizer: Left as it is.
        """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer.

        Args:
            optimizer: The optimizer.
            *args: Passed to its step.
            **kwargs: Passed to its step.

        Returns:
            What the optimizer's own step returns.
        """
        return optimizer.step(*args, **kwargs)

    def discard(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Collect the state, of which there is none.

        Returns:
            An empty dict.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept any state: a run that scaled its loss may go on in bfloat16.

        Args:
            state: Dropped.
        """


@final
class DynamicScaler(LossScaler):
    """Grows the scale while steps succeed and shrinks it when gradients overflow.

    The arithmetic is `torch.amp.GradScaler`'s. All ranks decide alike as long as the gradients that they see are
    equal, as they are once data parallelism has averaged them: an overflow on one rank reaches all.

    Args:
        config: The rule by which the scale moves.
        device_type: ``"cpu"`` or ``"cuda"``: where the gradients are.

    Example:
        >>> import torch
        >>> from colossal.amp import DynamicScaler, ScalerConfig
        >>> scaler = DynamicScaler(ScalerConfig(init_scale=8.0), device_type="cpu")
        >>> scaler.scale(torch.tensor(1.0)).item()
        8.0
    """

    def __init__(self, config: ScalerConfig, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type, **asdict(config))
        self._unscaled = False
        self._dropped = False

    @property
    def scale_value(self) -> float:
        """The factor that the next loss is multiplied by."""
        return self._scaler.get_scale()

    @property
    def dropped(self) -> bool:
        """Whether the last step was dropped because a gradient was infinite or NaN."""
        return self._dropped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale.

        Args:
            loss: Any shape.

        Returns:
            The scaled loss; same shape.

        Raises:
            ConfigError: The gradients at hand are unscaled already; scaled ones would be added to them.
        """
        if self._unscaled:
            raise ConfigError(
                "A backward pass under loss scaling must come before the gradients are unscaled. Found gradients that "
                "clipping or get_grad_norm unscaled. Call step() or zero_grad() first."
            )
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once for each step however often it is called.

        Args:
            optimizer: Holds the parameters whose gradients are divided.
        """
        if not self._unscaled:
            self._scaler.unscale_(optimizer)
            self._unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer unless a gradient is infinite or NaN; then move the scale.

        Args:
            optimizer: The optimizer.
            *args: Passed to its step.
            **kwargs: Passed to its step.

        Returns:
            What the optimizer's own step returns, or None for a step that was dropped.
        """
        before = self._scaler.get_scale()
        result = self._scaler.step(optimizer, *args, **kwargs)
        self._scaler.update()
        self._unscaled = False
        self._dropped = self._scaler.get_scale() < before
        # A dropped step is a step to a schedule: without this, torch warns that the schedule came first.
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        return result

    def discard(self) -> None:
        """Forget that gradients were unscaled: they are thrown away without a step.

        The scale moves as for a step, so that an overflow that was thrown away still lowers it.
        """
        if self._unscaled:
            self._scaler.update()
            self._unscaled = False

    def state_dict(self) -> dict[str, Any]:
        """Collect the scale, its rule and the number of steps since the last overflow.

        Returns:
            Plain numbers under the names that `torch.amp.GradScaler` gives them.
        """
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Args:
            state: What `state_dict` returned. An empty one, from a run in bfloat16, changes nothing.
        """
        if state:
            self._scaler.load_state_dict(state)
