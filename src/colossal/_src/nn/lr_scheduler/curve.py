"""Curves: the rate as a function of the step and the base rate, and the two ways to prepend a warm-up to one.

A curve knows its own number of steps and nothing of optimizers. :class:`WarmUp` and :class:`Hold` are curves that run
for some steps and then hand over to another curve, which is how every "warm-up" schedule is made.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol


class Curve(Protocol):
    """The rate of one parameter group as a function of the step."""

    @property
    def steps(self) -> int:
        """The step at which the curve ends."""
        ...

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``, from 0 to :attr:`steps`, of a group whose base rate is ``base``."""
        ...


@dataclass(frozen=True)
class WarmUp:
    """A straight line from ``base / (warmup_steps + 1)`` up to ``base``, then another curve."""

    warmup_steps: int
    after: Curve

    @property
    def steps(self) -> int:
        """The warm-up and the curve after it."""
        return self.warmup_steps + self.after.steps

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        if step < self.warmup_steps:
            return base * (step + 1) / (self.warmup_steps + 1)
        return self.after.rate(step - self.warmup_steps, base)


@dataclass(frozen=True)
class Hold:
    """The base rate for some steps, then another curve."""

    hold_steps: int
    after: Curve

    @property
    def steps(self) -> int:
        """The constant part and the curve after it."""
        return self.hold_steps + self.after.steps

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        return base if step < self.hold_steps else self.after.rate(step - self.hold_steps, base)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from ``base`` down to ``eta_min`` (Loshchilov and Hutter, SGDR, arXiv:1608.03983)."""

    steps: int
    eta_min: float

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * step / self.steps)) / 2


@dataclass(frozen=True)
class Polynomial:
    """A power of the remaining fraction of steps, from ``base`` down to ``end_lr``; ``base`` if there is no step."""

    steps: int
    end_lr: float
    power: float

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        if not self.steps:
            return base
        return self.end_lr + (base - self.end_lr) * (1 - step / self.steps) ** self.power


@dataclass(frozen=True)
class MultiStep:
    """The base rate times ``gamma`` for every milestone reached. Milestones are in order."""

    steps: int
    milestones: tuple[int, ...]
    gamma: float

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        return base * self.gamma ** bisect_right(self.milestones, step)


@dataclass(frozen=True)
class Decay:
    """The base rate times ``gamma`` for every ``every`` completed steps."""

    steps: int
    every: int
    gamma: float

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        return base * self.gamma ** (step // self.every)


@dataclass(frozen=True)
class Factor:
    """The base rate times a function of the step."""

    steps: int
    function: Callable[[int], float]

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        return base * self.function(step)


@dataclass
class Product:
    """The base rate times the product of a function over the steps 1 to ``step``.

    The product up to the step that was last asked for is kept, so that a training of n steps calls the function n times
    instead of n squared. It is saved in the state: a resumed schedule does not call the function for the past.
    """

    steps: int
    function: Callable[[int], float]
    done: int = 0
    value: float = 1.0

    def rate(self, step: int, base: float) -> float:
        """Return the rate at ``step``."""
        if step < self.done:
            self.done, self.value = 0, 1.0
        while self.done < step:
            self.done += 1
            self.value *= self.function(self.done)
        return base * self.value


def curve_state(curve: Any) -> dict[str, Any]:
    """Return the numbers of a curve, and of the curves inside it, as a dictionary. Functions are left out."""
    values = {field.name: getattr(curve, field.name) for field in fields(curve)}
    return {
        name: curve_state(value) if is_dataclass(value) else value
        for name, value in values.items()
        if not callable(value)
    }


def curve_from_state(curve: Any, numbers: dict[str, Any]) -> Any:
    """Return a curve of the same kind with other numbers: the inverse of :func:`curve_state`."""
    inner = {
        name: curve_from_state(getattr(curve, name), value) for name, value in numbers.items() if type(value) is dict
    }
    return replace(curve, **{**numbers, **inner})
