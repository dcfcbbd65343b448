"""The verbs of a boosted optimizer that measure and clip gradients."""

import math

import torch

from colossal._src.amp import LossScaler, NoScaler
from colossal._src.interface.full_spec import Peers
from colossal._src.interface.gradients import clamp, scale, total_norm
from colossal._src.tensor import grad_of
from colossal.errors import ConfigError

_WIDE = torch.float32.itemsize


class ClippingMixin:
    """What `OptimizerWrapper` does with the norm of gradients.

    Attributes:
        optim: The optimizer that holds the state and does the update.
        scaler: The loss scaler.
    """

    optim: torch.optim.Optimizer
    scaler: LossScaler
    _max_norm: float
    _norm_type: float
    _peers: Peers | None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups; master weights where there are some."""
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    @property
    def _grads(self) -> list[torch.Tensor]:
        return [grad for grad in map(grad_of, self.parameters) if grad is not None]

    @property
    def max_norm(self) -> float:
        """The largest common norm of the gradients that a step uses, 0 for none; set on all ranks, it counts from then.

        Raises:
            ConfigError: It is set to a norm below 0.
        """
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        if not value >= 0:
            raise ConfigError(
                f"Gradients are clipped to a norm of at least 0, which does not clip. Found max_norm={value}. Set 0.0 "
                "or more."
            )
        self._max_norm = value

    def set_max_norm(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clip the common norm of the gradients before each step.

        Args:
            max_norm: The largest norm that is left.
            norm_type: The p of that norm.

        Raises:
            ConfigError: There is another limit already.
        """
        if (found := (self._max_norm, self._norm_type)) != (max_norm, norm_type) and found[0] > 0:
            raise ConfigError(
                f"Gradients are clipped to one norm. Found max_norm={max_norm} with norm_type={norm_type} next to "
                f"{found[0]} with {found[1]} of the plugin. Pass one of them."
            )
        self._max_norm, self._norm_type = max_norm, norm_type

    def unscale_grad(self) -> None:
        """Divide the gradients by the loss scale, where the optimizer holds them."""
        raise NotImplementedError

    def _check_scaled(self) -> None:
        """Refuse gradients of a loss that was not scaled."""
        raise NotImplementedError

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Limit every element of every gradient to ``[-clip_value, clip_value]``.

        Args:
            clip_value: The largest magnitude that is left.

        Communication: as in `unscale_grad`.
        """
        self.unscale_grad()
        clamp(self._grads, clip_value)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients by one factor so that their common norm is at most `max_norm`.

        Args:
            max_norm: The largest norm that is left.
            norm_type: The p of the p-norm; ``float("inf")`` for the largest magnitude.
            error_if_nonfinite: Raise if the norm is infinite or NaN.

        Returns:
            The norm before clipping; a scalar, the same on all ranks.

        Raises:
            RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
            UnsupportedError: The gradients are sharded, and `norm_type` is not greater than 0.

        Communication: all_reduce, the axes that shard gradients, 8 bytes each; none for full gradients. Before, as
        in `unscale_grad`.
        """
        self.unscale_grad()
        norm = self._measure(norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"Clipping with error_if_nonfinite needs a finite norm. Found {norm.item()}: a gradient is non-finite. "
                "Skip the step, or leave error_if_nonfinite out."
            )
        scale(self._grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def get_grad_norm(self, norm_type: float = 2.0) -> float:
        """Measure the norm of all gradients, unscaled.

        Args:
            norm_type: The p of the p-norm.

        Returns:
            The norm of all gradients together, as if they were one vector; the same on all ranks.

        Raises:
            UnsupportedError: The gradients are sharded, and `norm_type` is not greater than 0.

        Communication: all_reduce, the axes that shard gradients, 8 bytes each; none for full gradients. Before, as
        in `unscale_grad`.
        """
        from colossal._src.comm import CallOfAllRanks

        with CallOfAllRanks("measure the norm of gradients"):
            self.unscale_grad()
            return self._measure(norm_type).item()

    def _measure(self, norm_type: float) -> torch.Tensor:
        return total_norm(self.parameters, norm_type, self._peers)

    def _clip_and_divide(self) -> dict[str, float]:
        """Clip to the norm of the constructor, or let an optimizer clip and unscale in its own pass."""
        is_scaled = not isinstance(self.scaler, NoScaler)
        divides = hasattr(self.optim, "set_param_copies") and all(grad.dtype.itemsize >= _WIDE for grad in self._grads)
        reads = is_scaled or (self._max_norm > 0 and all(grad.is_cpu for grad in self._grads))
        if divides and reads:  # as those of colossal.nn.optimizer; unscaled gradients on an accelerator need no wait
            self._check_scaled()
            norm = self._measure(self._norm_type).cpu()
            scale_ = self.scaler.overflow_from_norm(norm)
            if scale_ is not None:
                # torch's clipping adds the same small number
                limit = (float(norm) / scale_ + 1e-6) / self._max_norm if self._max_norm > 0 else 0.0
                return {"div_scale": scale_ * limit} if math.isfinite(limit) and limit > 1 else {"div_scale": scale_}
        if self._max_norm > 0:
            self.clip_grad_by_norm(self._max_norm, self._norm_type)
        return {}
