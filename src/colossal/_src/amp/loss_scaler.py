"""The interface of loss scalers, and the scaler that does nothing."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import distributed as dist


class LossScaler(ABC):
    """The interface between an optimizer wrapper and a loss scaler, in the order of a step: scale, unscale, step.

    Example:
        >>> from colossal.amp import LossScaler
        >>> from colossal.amp.naive_amp import ConstantGradScaler
        >>> isinstance(ConstantGradScaler(128.0), LossScaler)
        True
    """

    @property
    @abstractmethod
    def scale_value(self) -> float:
        """The factor that the next loss is multiplied by."""

    @property
    @abstractmethod
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was infinite or NaN."""

    @abstractmethod
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale.

        Args:
            loss: Any shape.

        Returns:
            The scaled loss; same shape.

        Raises:
            ConfigError: Gradients are unscaled already and wait for a step.
        """

    def scaled_loss(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002 (for those that look at the gradients)
    ) -> AbstractContextManager[torch.Tensor]:
        """Open the context in which a backward pass of the scaled loss runs.

        Args:
            loss: A scalar.
            optimizer: Holds the parameters that receive gradients.

        Returns:
            A new context manager that yields the scaled loss.
        """
        return nullcontext(self.scale(loss))

    @abstractmethod
    def unscale(self, optimizer: torch.optim.Optimizer, peers: Iterable[dist.ProcessGroup] = ()) -> None:
        """Divide the gradients by the scale, once for each step however often it is called.

        Args:
            optimizer: Holds the parameters whose gradients are divided.
            peers: Groups of ranks that have other parameters of the model.

        Communication: all_reduce, the axes that shard or replicate a parameter and `peers`, 4 bytes each, where ranks
        have to agree on an overflow.
        """

    def overflow_from_norm(self, norm: torch.Tensor) -> float | None:  # noqa: ARG002 (for those that overflow_from_norm)
        """Decide by the norm of scaled gradients, for an optimizer that unscales them in its own pass.

        Args:
            norm: Of all gradients together; the same on all ranks that must agree.

        Returns:
            What the optimizer has to divide them by; None where the optimizer cannot do it, as by default.
        """
        return None

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer unless a gradient is infinite or NaN; then move the scale.

        Args:
            optimizer: The optimizer.
            *args: Passed to its step.
            **kwargs: Passed to its step.

        Returns:
            What the optimizer's own step returns, or None for a step that was skipped.

        Raises:
            UnsupportedError: The scaler needs gradients that are there already, and a closure would compute new ones.

        Communication: that of `unscale`, if the gradients are still scaled.
        """

    @abstractmethod
    def discard(self) -> None:
        """Reset the state of gradients that are discarded without a step."""

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
    """Leaves loss and gradients as they are: for float32 and bfloat16, whose range needs no help."""

    @property
    def scale_value(self) -> float:
        """Always 1."""
        return 1.0

    @property
    def skipped(self) -> bool:
        """Always False."""
        return False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Leave a loss as it is."""
        return loss

    def overflow_from_norm(self, norm: torch.Tensor) -> float:  # noqa: ARG002 (any norm will do)
        """Decide by the norm of gradients."""
        return 1.0

    def unscale(self, optimizer: torch.optim.Optimizer, peers: Iterable[dist.ProcessGroup] = ()) -> None:
        """Do nothing."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer."""
        return optimizer.step(*args, **kwargs)

    def discard(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Collect the state, of which there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept any state: a run that scaled its loss may go on in bfloat16."""
