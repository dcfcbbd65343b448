# pyright: reportUnknownMemberType=false
"""How much memory of a device a process may use."""

import os

import torch

from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError

_fractions: dict[str, float] = {}


def colo_set_process_memory_fraction(ratio: float) -> None:
    """Limit this process to a fraction of the memory of its device.

    On a CPU nothing enforces the limit: it is what `colo_device_memory_capacity` returns.

    Args:
        ratio: The fraction: greater than 0, at most 1.

    Raises:
        ConfigError: `ratio` is outside its range.

    Example:
        >>> from colossal.legacy.utils import colo_device_memory_capacity, colo_set_process_memory_fraction
        >>> full = colo_device_memory_capacity("cpu")
        >>> colo_set_process_memory_fraction(1.0)
        >>> colo_device_memory_capacity("cpu") == full
        True
    """
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"A fraction of the memory of a device is greater than 0 and at most 1. Found {ratio}. Pass 1.0 for all "
            "of it."
        )
    accelerator = get_accelerator()
    if not accelerator.is_cpu:
        torch.get_device_module(accelerator.name).set_per_process_memory_fraction(ratio)
    _fractions[accelerator.name] = ratio


def colo_device_memory_capacity(device: torch.device | str) -> int:
    """Return how much memory of a device this process may use.

    Args:
        device: The device; on a CPU the memory is that of the host, which all processes use together.

    Returns:
        The memory in bytes, times the fraction of `colo_set_process_memory_fraction`.

    Example:
        >>> from colossal.legacy.utils import colo_device_memory_capacity
        >>> colo_device_memory_capacity("cpu") > 0
        True
    """
    device = torch.device(device)
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        total = torch.get_device_module(device.type).get_device_properties(device).total_memory
    return int(total * _fractions.get(device.type, 1.0))
