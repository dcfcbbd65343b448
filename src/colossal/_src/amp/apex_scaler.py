"""The loss scaler of apex.amp, as a `LossScaler` that an optimizer wrapper uses."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.amp.loss_scaler import LossScaler
from colossal.errors import UnsupportedError


@final
class ApexScaler(LossScaler):
    """Lets apex scale the loss, unscale the gradients after each backward pass, and skip steps."""

    def __init__(self, amp: Any) -> None:
        self._amp = amp
        self._skipped = False
        self._skipped_optimizer: torch.optim.Optimizer | None = (
            None  # apex has replaced its next step by one that does nothing
        )

    @property
    def _state(self) -> dict[str, Any]:
        return self._amp.state_dict()["loss_scaler0"]

    @property
    def scale_value(self) -> float:
        """The factor that the next loss is multiplied by."""
        return float(self._state["loss_scale"])

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was infinite or NaN."""
        return self._skipped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale."""
        return loss.float() * self.scale_value

    def scaled_loss(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> AbstractContextManager[torch.Tensor]:
        """Open ``apex.amp.scale_loss``, which unscales the gradients when it is closed."""
        return self._scaled_loss(loss, optimizer)

    @contextmanager
    def _scaled_loss(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        step = optimizer.step
        with self._amp.scale_loss(loss, optimizer) as scaled:
            yield scaled
        if optimizer.step != step:
            self._skipped_optimizer = optimizer

    def unscale(self, optimizer: torch.optim.Optimizer, peers: Iterable[dist.ProcessGroup] = ()) -> None:
        """Do nothing: gradients are unscaled as soon as their backward pass ends."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer; after an overflow apex makes that step do nothing."""
        if args or kwargs:
            raise UnsupportedError(
                "A step under apex uses gradients that are there already. Found a closure, which computes new ones. "
                "Call step() without a closure."
            )
        self._skipped = self._skipped_optimizer is not None
        self._skipped_optimizer = None
        result = optimizer.step()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 (a skipped step is one to a schedule)
        return result

    def discard(self) -> None:
        """Reset the overflow of gradients that are discarded without a step, so that the next step is taken."""
        if self._skipped_optimizer is not None:
            self._skipped_optimizer.step()
            self._skipped_optimizer = None

    def state_dict(self) -> dict[str, Any]:
        """Collect the scale and the number of steps since it last moved."""
        return {"scale": self.scale_value, "_growth_tracker": self._state["unskipped"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, which may be that of another precision."""
        if state:
            content = {"loss_scale": float(state["scale"]), "unskipped": int(state.get("_growth_tracker", 0))}
            self._amp.load_state_dict({"loss_scaler0": content})
