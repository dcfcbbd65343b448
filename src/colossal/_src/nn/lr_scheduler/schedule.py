"""The base of all schedules: a curve per parameter group, applied to the optimizer at every step."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal._src.nn.lr_scheduler.curve import Curve, curve_from_state, curve_state
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


class Schedule(LRScheduler):
    """Base of the schedules of this package: the rate of each parameter group follows a curve.

    Args:
        optimizer: The plain PyTorch optimizer. The ``lr`` of each of its groups is the base rate, unless an earlier
            schedule has left an ``initial_lr`` there.
        curve: One curve for all groups, or a list with one per group.
        last_epoch: The last step that was done, -1 for a fresh start. A resumed schedule starts one step later.

    Raises:
        ConfigError: ``optimizer`` is not a PyTorch optimizer, the number of curves is not the number of groups, or
            ``last_epoch`` asks to resume on an optimizer that was never scheduled.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve | Sequence[Curve], last_epoch: int = -1) -> None:
        _check_resumable(optimizer, check_integer("last_epoch", last_epoch, at_least=-1))
        self.curves: list[Curve] = per_group_values("curve", curve, optimizer)
        super().__init__(optimizer, last_epoch)

    @property
    def total_steps(self) -> int:
        """The number of steps of the schedule; its last rate is held afterwards."""
        return self.curves[0].steps

    def get_lr(self) -> list[float | Tensor]:
        """Compute the rates of the current step from the closed formula.

        Returns:
            One rate per parameter group.
        """
        step = min(self.last_epoch, self.total_steps)
        return [curve.rate(step, float(base)) for curve, base in zip(self.curves, self.base_lrs, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Collect where the schedule stands and the numbers of its curves.

        A file of it can be read with ``torch.load(weights_only=True)``. Functions given by the user are not in it: the
        schedule that loads the state must have been built with them.

        Returns:
            Plain Python values by name.
        """
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": [float(base) for base in self.base_lrs],
            "curves": [curve_state(curve) for curve in self.curves],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, and set the rates of that step in the optimizer.

        As in PyTorch, the saved numbers (``total_steps``, ``eta_min``, ...) replace the ones given to the constructor.

        Args:
            state_dict: What :meth:`state_dict` of a schedule of the same class returned.

        Raises:
            ConfigError: The state is of another class of schedule, or of another number of parameter groups.
        """
        self._check_state(state_dict)
        numbers = zip(self.curves, state_dict["curves"], strict=True)
        self.curves = [curve_from_state(curve, saved) for curve, saved in numbers]
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        self._set_rates()

    def _check_state(self, state: dict[str, Any]) -> None:
        required = [_shape(curve_state(curve)) for curve in self.curves]
        found = [_shape(numbers) for numbers in state.get("curves", [])]
        missing = {"last_epoch", "step_count", "base_lrs", "curves"} - state.keys()
        if missing or required != found:
            raise ConfigError(
                f"The state of a {type(self).__name__} with {len(self.curves)} parameter groups must hold {required}. "
                f"Found {found}, without {sorted(missing)}. "
                "Build the same schedule, on as many groups, as the one that was saved."
            )

    def _set_rates(self) -> None:
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def _shape(numbers: dict[str, Any]) -> list[Any]:
    """Return the names in the numbers of a curve, those of the curve inside it in a list of their own."""
    return [[name, _shape(value)] if isinstance(value, dict) else name for name, value in sorted(numbers.items())]


def _check_resumable(optimizer: Optimizer, last_epoch: int) -> None:
    unknown = [index for index, group in enumerate(param_groups_of(optimizer)) if "initial_lr" not in group]
    if last_epoch >= 0 and unknown:
        raise ConfigError(
            f"last_epoch={last_epoch} resumes a schedule, which needs initial_lr in every parameter group. "
            f"Found none in groups {unknown}. Load the state of the optimizer first, or leave last_epoch at -1 and "
            "load the state of the schedule."
        )
