"""The one-cycle policy: the rate goes up and down once while momentum goes the other way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.optim import Optimizer

from colossal._src.nn.lr_scheduler.schedule import (
    Schedule,
    check_fraction,
    check_number,
    param_groups_of,
    per_group_values,
    steps_after_warmup,
)
from colossal.errors import ConfigError


def _cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def _line(start: float, end: float, done: float) -> float:
    return start + (end - start) * done


_BLENDS = {"cos": _cosine, "linear": _line}


@dataclass(frozen=True)
class OneCycle:
    """The rate and the momentum of one parameter group over one cycle."""

    steps: int
    pct_start: float
    anneal_strategy: str
    div_factor: float
    final_div_factor: float
    base_momentum: float
    max_momentum: float

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``: start, peak at ``base``, end."""
        start = base / self.div_factor
        return self._cycle(step, start, base, start / self.final_div_factor)

    def momentum(self, step: int) -> float:
        """Return the momentum at ``step``: high, low at the peak of the rate, high."""
        return self._cycle(step, self.max_momentum, self.base_momentum, self.max_momentum)

    def _cycle(self, step: int, start: float, middle: float, end: float) -> float:
        blend = _BLENDS[self.anneal_strategy]
        peak, last = self.pct_start * self.steps - 1, self.steps - 1
        step = min(step, last)
        if step <= peak and peak > 0:
            return blend(start, middle, step / peak)
        return blend(middle, end, (step - peak) / (last - peak))


@final
class OneCycleLR(Schedule):
    r"""Raise the rate from a small value to the base rate, then lower it far below where it began.

    With the base rate :math:`b` of the group as the peak, :math:`T` = ``total_steps``, the blend
    :math:`c(s, e, x) = e + (s - e)(1 + \cos \pi x) / 2` (or the straight :math:`s + (e - s) x` with
    ``anneal_strategy="linear"``) and the peak at :math:`p = pct\_start \cdot T - 1`:

    .. math::
        \eta_k = c\left(\frac{b}{div}, b, \frac{k}{p}\right) \; (k \le p), \qquad
        \eta_k = c\left(b, \frac{b}{div \cdot final\_div}, \frac{k - p}{T - 1 - p}\right) \; (p < k \le T - 1)

    The last rate, at step :math:`T - 1`, is held afterwards, where PyTorch's schedule of the same name raises an error.
    Momentum (``momentum``, or the first of ``betas``) goes the other way, from ``max_momentum`` to ``base_momentum``
    and back. Where :math:`p \le 0` there is no room to rise and the schedule begins on the way down. Source: Smith and
    Topin, "Super-Convergence", arXiv:1708.07120.

    Args:
        optimizer: The plain PyTorch optimizer.
        total_steps: Steps of the entire cycle, at least 1.
        pct_start: Fraction of the steps on which the rate goes up, strictly between 0 and 1.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        cycle_momentum: Whether momentum moves too. The optimizer must have one.
        base_momentum: The momentum at the peak of the rate, in [0, 1), or a list with one per parameter group.
        max_momentum: The momentum at both ends, in [0, 1), or a list with one per parameter group.
        div_factor: The peak over the first rate, above 0.
        final_div_factor: The first rate over the last one, above 0.
        last_epoch: The last step that was done, -1 for a fresh start.

    Raises:
        ConfigError: An argument is out of its range, a list has the wrong length, or ``cycle_momentum`` is set for an
            optimizer that has neither ``momentum`` nor ``betas``.

    Example:
        >>> import torch
        >>> from colossal.nn.lr_scheduler import OneCycleLR
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(2, 1).parameters(), lr=0.8)
        >>> scheduler = OneCycleLR(optimizer, total_steps=10, pct_start=0.5, div_factor=8.0)
        >>> for _ in range(4):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> scheduler.get_last_lr(), optimizer.param_groups[0]["betas"]
        ([0.8], (0.85, 0.999))
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.85,
        max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
    ) -> None:
        self._momentum_key = _momentum_key(optimizer) if cycle_momentum else None
        shape = (
            steps_after_warmup(total_steps, 0),
            check_fraction("pct_start", pct_start),
            _strategy(anneal_strategy),
            check_number("div_factor", div_factor, above=0.0),
            check_number("final_div_factor", final_div_factor, above=0.0),
        )
        low = [
            _momentum("base_momentum", value) for value in per_group_values("base_momentum", base_momentum, optimizer)
        ]
        high = [_momentum("max_momentum", value) for value in per_group_values("max_momentum", max_momentum, optimizer)]
        super().__init__(optimizer, [OneCycle(*shape, *pair) for pair in zip(low, high, strict=True)], last_epoch)

    def step(self, epoch: int | None = None) -> None:
        """Set the rate and the momentum of the next step.

        Args:
            epoch: Deprecated in PyTorch: a step to jump to.
        """
        super().step(epoch)
        self._set_momenta()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, and set the rates and the momenta of that step in the optimizer.

        Args:
            state_dict: What :meth:`state_dict` of a ``OneCycleLR`` returned.

        Raises:
            ConfigError: The state is of another class of schedule, or of another number of parameter groups.
        """
        super().load_state_dict(state_dict)
        self._set_momenta()

    def _set_momenta(self) -> None:
        for group, curve in zip(self.optimizer.param_groups, self.curves, strict=True):
            assert isinstance(curve, OneCycle)
            momentum = curve.momentum(self.last_epoch)
            if self._momentum_key == "betas":
                group["betas"] = (momentum, *group["betas"][1:])
            elif self._momentum_key == "momentum":
                group["momentum"] = momentum


def _strategy(name: str) -> str:
    if name not in _BLENDS:
        raise ConfigError(f"anneal_strategy must be one of {sorted(_BLENDS)}. Found {name!r}. Pass one of them.")
    return name


def _momentum(name: str, value: float) -> float:
    plain = check_number(name, value, at_least=0.0)
    if not plain < 1.0:
        raise ConfigError(f"{name} must be at least 0 and below 1. Found {value!r}. Pass, say, 0.9.")
    return plain


def _momentum_key(optimizer: Optimizer) -> str:
    groups = param_groups_of(optimizer)
    for key in ("betas", "momentum"):
        if all(key in group for group in groups):
            return key
    raise ConfigError(
        "cycle_momentum=True needs an optimizer with 'momentum' or 'betas'. "
        f"Found {type(optimizer).__name__} with neither. Pass cycle_momentum=False."
    )
