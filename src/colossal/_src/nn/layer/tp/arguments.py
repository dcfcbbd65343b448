"""Arguments of layers: refused where their type shows that they were meant for another one; and initializers."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from colossal.errors import ConfigError

Initializer = Callable[..., Any]
"""Fills a full parameter in place: `f(tensor)` as `torch.nn.init` has them, or `f(tensor, fan_in, fan_out)`."""


def check_types(layer: object, *, dtype: Any, device: Any, switches: Mapping[str, Any]) -> None:
    """Refuse a value that stands at the place of another argument, which torch or Python would silently accept."""
    wanted = {switch: (isinstance(value, int), value, "True or False") for switch, value in switches.items()}
    wanted["dtype"] = dtype is None or isinstance(dtype, torch.dtype), dtype, "a torch.dtype"
    is_device = isinstance(device, (str, int, torch.device)) and not isinstance(device, bool)
    wanted["device"] = device is None or is_device, device, "a device or its name"
    for argument, (fits, value, kind) in wanted.items():
        if not fits:
            raise ConfigError(
                f"{argument} of {type(layer).__name__} is {kind}. Found {value!r} in its place. "
                f"{_advice(type(layer), value)}"
            )


def _advice(kind: type, value: object) -> str:
    """Name the keywords that such a value may have been meant for."""
    parameters = inspect.signature(kind).parameters.values()
    if isinstance(value, bool):
        names = [parameter.name for parameter in parameters if isinstance(parameter.default, bool)]
    elif callable(value):
        names = [parameter.name for parameter in parameters if parameter.name.endswith("initializer")]
    else:
        names = ["dtype" if isinstance(value, torch.dtype) else "device"]
    return f"Pass it by its name: {' or '.join(f'{name}=...' for name in names)}." if names else "Leave it out."


def initialize(fill: Initializer, tensor: torch.Tensor, fans: tuple[int, int]) -> None:
    """Call an initializer in the form that it has.

    One with parameters named `fan_in` or `fan_out` gets those by their names, one that requires three values gets all
    of them in this order, any other the tensor alone.
    """
    try:
        parameters = inspect.signature(fill).parameters.values()
    except ValueError:  # of a function in C, such as a method of torch.Tensor
        fill(tensor)
        return
    by_name = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    named = {name: fan for name, fan in zip(("fan_in", "fan_out"), fans, strict=True) if name in by_name}
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in named
    ]
    if named and len(required) <= 1:
        fill(tensor, **named)
    elif len(required) <= 1:
        fill(tensor)
    elif len(required) == 3:  # noqa: PLR2004 (the tensor and both fans)
        fill(tensor, *fans)
    else:
        raise ConfigError(
            "An initializer takes the tensor, or the tensor, fan_in and fan_out. Found one that requires "
            f"{', '.join(required)}. Bind the others with functools.partial."
        )
