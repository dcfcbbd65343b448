"""Whether saved states of an optimizer are those of the algorithm that is to continue from them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

from colossal._src.interface.optimizer_check import arguments_of, without_params
from colossal.errors import ConfigError

# fmt: off
_TELLING = frozenset([
    "adam", "alpha", "beta1", "beta2_decay", "betas", "centered", "clip_threshold", "d", "dampening", "decay_rate",
    "eeta", "etas", "initial_accumulator_value", "lambd", "lr_decay", "momentum", "momentum_decay", "nesterov",
    "ns_steps", "rank", "relative_step", "rho", "step_sizes", "t0",
])
# fmt: on
"""Hyperparameters that tell algorithms apart; others are of versions and implementations, or of the program."""
_PLAIN = (bool, int, float, str, list, tuple, type(None))
_SHAPES = ((4, 6), (5,))
_TRIED = ("torch.optim.", "colossal.")
"""Whose states have the same names for parameters of any size."""


def another_algorithm(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], states: Sequence[Iterable[Iterable[str]]]
) -> str | None:
    """Say what saved groups have, what the optimizer has, and what to do, if they are of another algorithm; else None.

    Args:
        optimizer: What is to continue.
        groups: Saved hyperparameters, a mapping for each group of the optimizer.
        states: Of each group, the names of the saved states of each parameter.
    """
    owners = [each for one in getattr(optimizer, "optimizers", (optimizer,)) for each in [one] * len(one.param_groups)]
    for owner, own, saved, entries in zip(owners, optimizer.param_groups, groups, states, strict=False):
        required, found = own.keys() & _TELLING, saved.keys() & _TELLING
        if required != found:
            return _difference(owner, "hyperparameters", required, found)
        names = set[str]().union(*entries)
        required = _state_names(owner, saved) if names else set()
        if not required <= names:
            return _difference(owner, "states", required, names)
    return None


def check_algorithm(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse a state dict of another algorithm, which would fail in the next step, or go on with wrong states."""
    groups, state = state_dict["param_groups"], state_dict["state"]
    states = [[state[number] for number in group["params"] if number in state] for group in groups]
    if another := another_algorithm(optimizer, groups, states):
        raise ConfigError(f"load_state_dict takes states of the algorithm of the optimizer. Found {another}.")


def _difference(optimizer: Optimizer, what: str, required: Iterable[str], found: Iterable[str]) -> str:
    listed = [", ".join(sorted(names)) or "none" for names in (required, found)]
    return (
        f"the {what} {listed[1]}, where {type(optimizer).__name__} has {listed[0]}. Build the optimizer that was "
        "saved, or load the model only, and let the states of this one start from nothing"
    )


def _state_names(optimizer: Optimizer, saved: Mapping[str, Any]) -> set[str]:
    """Return the names of the states that each parameter has after a step with saved hyperparameters, but its count."""
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith(_TRIED):
        return set()
    known = {name: value for name, value in arguments_of(optimizer, optimizer.param_groups[0]).items() if name in saved}
    options = {name: value for name, value in without_params(dict(saved)).items() if isinstance(value, _PLAIN)}
    names: list[set[str]] = []
    for shape in _SHAPES:
        tried = torch.nn.Parameter(torch.ones(shape, device="cpu"))
        tried.grad = torch.ones_like(tried)
        with suppress(Exception):  # of one that takes other parameters, such as matrices only
            made = kind([{**options, "params": [tried]}], **known)
            made.step()
            names.append(set(made.state[tried]) - {"step"})
    return set.intersection(*names) if names else set()
