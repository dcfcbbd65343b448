"""Loss scaling: keeps small half-precision gradients from underflow, and skips steps whose gradients overflowed.

Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.amp.loss_scaler import LossScaler
from colossal._src.amp.overflow import unscale_and_find_overflow
from colossal.errors import CheckpointError, ConfigError, UnsupportedError
from colossal.logging import get_dist_logger

_MIN_NORMAL = 2.0**-126
"""The smallest normal number of float32: below it the scale has no reciprocal."""


@final
@dataclass(frozen=True)
class ScalerConfig:
    """The rule by which the loss scale changes."""

    init_scale: float = 2.0**16  # first scale; greater than 0
    growth_factor: float = 2.0  # factor after `growth_interval` steps in a row without an overflow; greater than 1
    backoff_factor: float = 0.5  # factor after a step that overflowed; between 0 and 1
    growth_interval: int = 2000  # number of steps without an overflow after which the scale grows; at least 1
    min_scale: float | None = None  # the scale does not fall below it; no limit by default
    max_scale: float | None = None  # the scale does not grow above it; no limit by default
    # Number of overflows since the scale last grew that it takes until it falls; at least 1. Later ones lower it at
    # once.
    hysteresis: int = 1

    def __post_init__(self) -> None:
        low, high = self.limits
        rules = (
            ("init_scale", "greater than 0 and finite", 0 < self.init_scale < math.inf),
            ("growth_factor", "greater than 1", self.growth_factor > 1),
            ("backoff_factor", "between 0 and 1", 0 < self.backoff_factor < 1),
            ("growth_interval", "at least 1", self.growth_interval >= 1),
            ("min_scale", "greater than 0 and at most init_scale", 0 < low <= self.init_scale),
            ("max_scale", "at least init_scale", self.init_scale <= high),
            ("hysteresis", "at least 1", self.hysteresis >= 1),
        )
        for name, range_, holds in rules:
            if not holds:
                raise ConfigError(
                    f"A loss scaler needs {name} {range_}. Found {name}={getattr(self, name)}. "
                    f"The default is {name}={type(self).__dataclass_fields__[name].default}."
                )

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest scale."""
        low = min(_MIN_NORMAL, self.init_scale) if self.min_scale is None else self.min_scale
        return low, math.inf if self.max_scale is None else self.max_scale


@final
class DynamicScaler(LossScaler):
    """Grows the scale while steps succeed and shrinks it when gradients overflow.

    With the default rule the scale takes the values that it takes under `torch.amp.GradScaler`. An overflow anywhere
    skips the step on all ranks: each rank checks its local shards of the gradients, and they agree over the groups that
    parameters are sharded over. Data parallelism needs no such group, for an average with an infinite term is infinite
    on all ranks.
    """

    def __init__(
        self,
        config: ScalerConfig,
        device_type: str,
        verbose: bool = False,
        unscale_fp16_grads: bool = False,
    ) -> None:
        self._rule = config
        self._unscale_fp16_grads = unscale_fp16_grads
        if unscale_fp16_grads:
            get_dist_logger().warning(
                "float16 parameters are updated without float32 master weights: gradients below 6e-8 and small updates "
                "are lost, and an optimizer whose state is float16 too, such as torch.optim.Adam, may divide by zero. "
                "colossal.nn.optimizer.HybridAdam keeps its state in float32.",
                ranks=[0],
            )
        self._device_type = device_type
        self._verbose = verbose
        self._scale = _float32(config.init_scale)
        self._good_steps = 0
        self._overflows = 0
        self._overflow: torch.Tensor | None = None  # of gradients that are unscaled and wait for a step
        self._skipped = False

    @property
    def scale_value(self) -> float:
        """The factor that the next loss is multiplied by."""
        return self._scale

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was infinite or NaN."""
        return self._skipped

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale."""
        if self._overflow is not None:
            raise ConfigError(
                "A backward pass under loss scaling must come before the gradients are unscaled. Found gradients that "
                "clipping or get_grad_norm unscaled. Call step() or zero_grad() first."
            )
        return loss * self._scale

    def unscale(self, optimizer: torch.optim.Optimizer, peers: Iterable[dist.ProcessGroup] = ()) -> None:
        """Divide the gradients by the scale, once for each step however often it is called.

        Communication: all_reduce, the axes that shard or replicate a parameter and `peers`, 4 bytes each.
        """
        if self._overflow is None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._overflow = unscale_and_find_overflow(
                parameters, self._scale, self._device_type, peers, allow_fp16=self._unscale_fp16_grads
            )

    def overflow_from_norm(self, norm: torch.Tensor) -> float | None:
        """Decide by the norm of scaled gradients, for an optimizer that unscales them in its own pass."""
        if self._overflow is not None:
            return None
        self._overflow = (~norm.isfinite()).float()
        return self._scale

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, div_scale: float | None = None, **kwargs: Any) -> Any:
        """Step an optimizer unless a gradient is infinite or NaN; then move the scale.

        Communication: as in `unscale`, if the gradients are still scaled.
        """
        if args or kwargs:
            raise UnsupportedError(
                "A step under loss scaling uses gradients that are there already. Found a closure, which computes new "
                "ones. Train in float32 or with mixed_precision='bf16', or call step() without a closure."
            )
        # does nothing after that of the optimizer's wrapper, which knows the peers as well
        self.unscale(optimizer)
        self._skipped = self._update_scale()
        # A skipped step counts for a schedule: without this, torch warns that the schedule came first.
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 (a skipped step is one to a schedule)
        if self._skipped:
            return None
        options: dict[str, Any] = {} if div_scale is None else {"div_scale": div_scale}
        return optimizer.step(**options)

    def discard(self) -> None:
        """Reset the state of gradients that are discarded without a step.

        The scale is updated as in a step, so that an overflow that was discarded still lowers it.
        """
        if self._overflow is not None:
            self._update_scale()

    def _update_scale(self) -> bool:
        """Update the scale by the rule, and return whether the gradients had overflowed."""
        assert self._overflow is not None
        overflow = bool(self._overflow.item())
        self._overflow = None
        before = self._scale
        if overflow:
            self._good_steps = 0
            self._overflows += 1
            if self._overflows >= self._rule.hysteresis:
                self._multiply(self._rule.backoff_factor)
        else:
            self._good_steps += 1
            if self._good_steps == self._rule.growth_interval:
                self._good_steps = self._overflows = 0
                self._multiply(self._rule.growth_factor)
        if overflow or (self._verbose and self._scale != before):
            steps = f"{self._rule.growth_interval} steps without an overflow"
            what = "step skipped, a gradient overflowed" if overflow else steps
            get_dist_logger().info(f"{what}: loss scale {before:g} -> {self._scale:g}", ranks=[0])
        return overflow

    def _multiply(self, factor: float) -> None:
        low, high = self._rule.limits
        scale = _float32(self._scale * factor)
        # a scale that float32 cannot hold is not taken
        if math.isfinite(scale):
            self._scale = min(max(scale, low), high)

    def state_dict(self) -> dict[str, Any]:
        """Collect the scale, its rule and the number of steps since the last overflow."""
        return {
            "scale": self._scale,
            "growth_factor": self._rule.growth_factor,
            "backoff_factor": self._rule.backoff_factor,
            "growth_interval": self._rule.growth_interval,
            "_growth_tracker": self._good_steps,
            "overflows": self._overflows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, which may be that of another precision.

        Scale, counters, factors and growth interval are taken over. Limits and hysteresis stay those of this scaler,
        and the scale is moved between the limits.
        """
        if not state:
            return
        try:
            low, high = self._rule.limits
            # the state may be of a run with other limits
            scale = min(max(_float32(float(state["scale"])), low), high)
            names = ("growth_factor", "backoff_factor", "growth_interval")
            rule = replace(self._rule, **{name: state[name] for name in names if name in state})
            counters = int(state.get("_growth_tracker", 0)), int(state.get("overflows", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"A loss scaler needs a state with its scale and rule. Found {state}: {type(error).__name__} {error}. "
                "Load the optimizer from a checkpoint of save_optimizer."
            ) from error
        self._scale, self._rule = scale, rule
        self._good_steps, self._overflows = counters


def _float32(value: float) -> float:
    """Round as a scale that is kept in a float32 tensor."""
    return torch.tensor(value, dtype=torch.float32, device="cpu").item()
