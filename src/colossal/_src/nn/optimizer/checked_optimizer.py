"""The base of all optimizers here: checked arguments, and state that keeps its precision."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from colossal._src.tensor import copy_placement
from colossal.errors import ColossalError, ConfigError, UnsupportedError


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


OF_TORCH = ("amsgrad", "maximize", "differentiable")
"""Options of groups of optimizers of torch that change what a step does, and that no optimizer here has."""


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse a group whose steps would be others."""
    for name in OF_TORCH:
        if group.get(name):
            reject_option(name, group[name], "Leave it out, or use an optimizer of torch.optim, which has it.")


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters and parameters that an optimizer cannot work with."""
    check_options(group)
    for name, allowed in RANGES.items():
        if group.get(name) is not None and not allowed.holds(group[name]):
            raise ConfigError(f"{name} is {allowed.description}. Found {group[name]!r}. Pass a number in that range.")
    if isinstance(group.get("betas"), float):
        raise ConfigError(
            f"betas are a decay rate of each moment. Found {group['betas']!r}. Pass for example betas=(0.9, 0.999)."
        )
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


Closure = Callable[[], Any] | None

REPLICATED_STATE_SUFFIXES = ("_row", "_col")
"""Suffixes of the names of states that are replicated on all ranks, even if their length equals a rank's range."""


class CheckedOptimizer(Optimizer, ABC):
    """A torch optimizer whose state is float32 whatever its parameters are; float64 for float64.

    Args:
        params: Parameters, named parameters, or parameter groups.
        defaults: The hyperparameters of groups that do not have their own.

    Raises:
        ConfigError: A hyperparameter is out of its range.
        UnsupportedError: A parameter is not of real floating-point numbers, or `amsgrad` or `maximize` is set.
    """

    updates_shards = True
    """Whether a rank may hold shards of parameters: each element is updated by itself, or by sums over the full one."""

    keeps_float32 = True
    """Whether state is in float32 or more, so that a checkpoint of it is read in that precision."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state over; groups of another optimizer lack hyperparameters that this one has."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                if name != "differentiable":  # which torch adds to the defaults here, and reads there only
                    group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: ``{"params": [...]}`` with the group's own hyperparameters.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ColossalError:
            # torch adds a group before it can be checked
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: Computes the loss and its gradients anew.

        Returns:
            What the closure returned; None without one.

        Raises:
            UnsupportedError: A gradient is sparse.
        """
        loss = call_closure(closure)
        check_grads(self.params_with_grads)
        self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Update the parameters that have gradients."""

    @property
    def params_with_grads(self) -> list[torch.Tensor]:
        """The parameters that a step updates, in order."""
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, in the precision of the state rather than in that of the parameters.

        Args:
            state_dict: What `state_dict` returned, here or for an optimizer of torch with the same state.

        Raises:
            ConfigError: The state is that of another algorithm.
            UnsupportedError: A group has an option of torch that changes steps, and that no optimizer here has.
        """
        from colossal._src.interface import check_algorithm

        for group in state_dict["param_groups"]:
            check_options(group)
        check_algorithm(self, state_dict)
        super().load_state_dict(state_dict)
        saved = [id_ for group in state_dict["param_groups"] for id_ in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for id_, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(id_, {}).items():
                if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                    # from the saved state: torch has rounded what it loaded to the dtype of the parameter
                    placed = value.to(param.device, state_dtype(param))
                    self.state[param][name] = (
                        placed if name.endswith(REPLICATED_STATE_SUFFIXES) else copy_placement(placed, param)
                    )


def call_closure(closure: Closure) -> Any:
    """Call a closure with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def state_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype of the computation and of the state of a parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32
