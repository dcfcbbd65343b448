"""Checks of the arguments of the schedules; each raises a :class:`~colossal.errors.ConfigError`."""

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from colossal.errors import ConfigError


def check_integer(name: str, value: object, *, at_least: int) -> int:
    """Return ``value`` if it is an integer of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(
            f"{name} must be an integer of at least {at_least}. Found {value!r}. Pass a count of optimizer steps."
        )
    return value


def check_number(name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """Return ``value`` as a plain float if it is a finite number above the one bound and not below the other."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= above or value < at_least:
        bound = f"above {above:g}" if above > -math.inf else f"of at least {at_least:g}"
        raise ConfigError(f"{name} must be a finite number {bound}. Found {value!r}. Pass a number in that range.")
    return float(value)


def check_fraction(name: str, value: object) -> float:
    """Return ``value`` as a plain float if it is strictly between 0 and 1."""
    if not isinstance(value, float) or not 0.0 < value < 1.0:
        raise ConfigError(
            f"{name} must be a fraction of the steps, strictly between 0 and 1. Found {value!r}. Pass, say, 0.3."
        )
    return float(value)


def steps_after_warmup(total_steps: int, warmup_steps: int) -> int:
    """Return how many steps are left for the curve when the warm-up is over, at least one."""
    check_integer("total_steps", total_steps, at_least=1)
    check_integer("warmup_steps", warmup_steps, at_least=0)
    if warmup_steps >= total_steps:
        raise ConfigError(
            f"warmup_steps must be below total_steps. Found warmup_steps={warmup_steps} and total_steps={total_steps}. "
            "Shorten the warm-up or train for more steps."
        )
    return total_steps - warmup_steps


def param_groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of a PyTorch optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"A schedule needs a torch.optim.Optimizer. Found {type(optimizer).__name__}. "
            "Build the schedule on the plain optimizer, before boosting it."
        )
    return optimizer.param_groups


def per_group_values(name: str, value: object, optimizer: Optimizer) -> list[Any]:
    """Return a list with one entry per parameter group; a single value serves all groups."""
    count = len(param_groups_of(optimizer))
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"{name} must be one value or a list with one per parameter group. "
            f"Found {len(value)} entries for {count} groups. Pass exactly {count}."
        )
    return list(value)


def check_final_lr(name: str, value: float, optimizer: Optimizer) -> float:
    """Return ``value`` if every parameter group can decay to it: a decay must not end above where it starts."""
    value = check_number(name, value, at_least=0.0)
    for index, group in enumerate(param_groups_of(optimizer)):
        base = float(group.get("initial_lr", group["lr"]))
        if value > base:
            raise ConfigError(
                f"{name} must not exceed the base rate of any parameter group, or the rate would grow. "
                f"Found {name}={value:g} and a base rate of {base:g} in group {index}. Pass a smaller {name}."
            )
    return value
