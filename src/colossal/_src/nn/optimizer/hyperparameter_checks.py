"""Checks of what an optimizer is given: hyperparameters, parameters and gradients."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from colossal.errors import ConfigError, UnsupportedError


@final
@dataclass(frozen=True)
class Range:
    """The numbers that a hyperparameter may be, or each of several."""

    low: float  # the least
    high: float  # the number that all are below
    description: str  # for error messages

    def holds(self, value: Any) -> bool:
        """Return whether a value, or each value of a sequence, is in the range."""
        if isinstance(value, Sequence) and not isinstance(value, str):
            return all(map(self.holds, value))
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return self.low <= value < self.high


AT_LEAST_ZERO = Range(0.0, math.inf, "a finite number of at least 0")
UNIT_INTERVAL = Range(0.0, 1.0, "at least 0 and below 1")

RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "epsilon", "eeta", "momentum", "dampening", "scale"), AT_LEAST_ZERO),
    **dict.fromkeys(("betas", "beta1"), UNIT_INTERVAL),
    "clip_threshold": Range(5e-324, math.inf, "a finite number above 0"),
    "decay_rate": Range(-math.inf, 5e-324, "a finite number of at most 0"),
    "rank": Range(1, math.inf, "at least 1"),
    "update_proj_gap": Range(1, math.inf, "at least 1"),
}


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters and parameters that an optimizer cannot work with."""
    for name, allowed in RANGES.items():
        if group.get(name) is not None and not allowed.holds(group[name]):
            raise ConfigError(f"{name} is {allowed.description}. Found {group[name]!r}. Pass a number in that range.")
    for param in group["params"]:
        if not param.is_floating_point():
            raise UnsupportedError(
                f"These optimizers update real floating-point parameters. Found one in {param.dtype}, of the shape "
                f"{tuple(param.shape)}. Leave it out, or view it as real numbers."
            )


def check_grads(params: Iterable[torch.Tensor]) -> None:
    """Refuse gradients that only hold some of their elements."""
    for param in params:
        if param.grad is not None and param.grad.layout != torch.strided:
            raise UnsupportedError(
                f"These optimizers update with dense gradients. Found one in {param.grad.layout}, of a parameter of "
                f"the shape {tuple(param.shape)}. Build its torch.nn.Embedding with sparse=False."
            )


def reject_option(option: str, value: object, instead: str) -> None:
    """Refuse an option that is valid elsewhere and not built here."""
    raise UnsupportedError(f"This optimizer does not have {option} other than by default. Found {value!r}. {instead}")
