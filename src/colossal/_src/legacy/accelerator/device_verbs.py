"""The device of this process with the verbs of the older API, which are those of torch's module for the device."""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import nn

from colossal import accelerator as today
from colossal._src.legacy.notice import superseded
from colossal.accelerator import Accelerator
from colossal.errors import ConfigError, UnsupportedError

_M = TypeVar("_M", bound=nn.Module | Sequence[nn.Module])

_OF_TORCH = frozenset(
    [
        "current_device",
        "current_stream",
        "default_stream",
        "get_device_capability",
        "get_device_name",
        "get_device_properties",
        "get_rng_state_all",
        "initial_seed",
        "is_available",
        "manual_seed_all",
        "max_memory_cached",
        "max_memory_reserved",
        "memory_cached",
        "memory_reserved",
        "memory_snapshot",
        "memory_stats",
        "memory_summary",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "seed",
        "seed_all",
        "set_per_process_memory_fraction",
        "set_rng_state_all",
        "set_stream",
        "stream",
        "utilization",
        "Event",
        "Stream",
    ]
)


def _get_device_name(_device: Any = None) -> str:
    return platform.processor() or platform.machine()


def _set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
    (state,) = states
    torch.set_rng_state(state)


def _set_stream(stream: Any) -> None:
    """Do nothing: a CPU has one stream."""


_OF_CPU: Mapping[str, Callable[..., Any]] = {
    "default_stream": torch.cpu.current_stream,
    "get_device_name": _get_device_name,
    "get_rng_state": torch.get_rng_state,
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "initial_seed": torch.initial_seed,
    "manual_seed_all": torch.manual_seed,
    "seed": torch.seed,
    "seed_all": torch.seed,
    "set_rng_state": torch.set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
    "set_stream": _set_stream,
}
# A CPU has no allocator that keeps unused memory: what is reserved is what is allocated.
_ALLOCATED_ON_CPU = {
    "max_memory_cached": "max_memory_allocated",
    "max_memory_reserved": "max_memory_allocated",
    "memory_cached": "memory_allocated",
    "memory_reserved": "memory_allocated",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
# Verbs whose last argument is a device, and how many stand before it.
_OF_A_DEVICE: Mapping[str, int] = {
    "get_rng_state": 0,
    "max_memory_allocated": 0,
    "memory_allocated": 0,
    "reset_peak_memory_stats": 0,
    "set_rng_state": 1,
    "synchronize": 0,
}


def _of_the_only_device(verb: Callable[..., Any], num_args: int) -> Callable[..., Any]:
    """Let a verb of the CPU take the device that it has for accelerators."""

    def call(*args: Any, device: torch.device | str | int | None = None) -> Any:
        own, given = args[:num_args], [*args[num_args:], device]
        for each in given:
            if isinstance(each, torch.device | str) and torch.device(each).type != "cpu":
                raise ConfigError(
                    f"The accelerator of this process is the CPU. Found the device {str(each)!r}. Leave it out, or "
                    "pass get_accelerator().get_current_device()."
                )
        return verb(*own)

    return call


class BaseAccelerator:
    """The device of this process, with the verbs of the older API.

    Superseded by `colossal.accelerator.Accelerator`, which has what a training program asks of a device. Its verbs are
    here too, and those of torch's module for the device, such as ``torch.cuda``: ``get_device_properties``,
    ``memory_stats``, ``Stream`` and others.

    Args:
        name: The type of the device, as of `colossal.accelerator.get_accelerator`.

    Attributes:
        name: The same.

    Raises:
        ConfigError: There is no such device here.

    Example:
        >>> from colossal.legacy.accelerator import BaseAccelerator
        >>> cpu = BaseAccelerator("cpu")
        >>> cpu.get_current_device(), cpu.communication_backend, cpu.is_available()
        (device(type='cpu'), 'gloo', True)
    """

    def __init__(self, name: str) -> None:
        superseded("BaseAccelerator", "colossal.accelerator.get_accelerator()")
        self._device = today.get_accelerator(name)
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __getattr__(self, name: str) -> Any:
        """Find a verb of today's accelerator, or of torch.

        Raises:
            AttributeError: There was no such verb.
            UnsupportedError: There was, and this device has nothing of the kind.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        if self._device.is_cpu:
            name = _ALLOCATED_ON_CPU.get(name, name)
            verb = _OF_CPU.get(name) or getattr(self._device, name, None)
            if name in _OF_A_DEVICE and verb is not None:
                return _of_the_only_device(verb, _OF_A_DEVICE[name])
            if name in _OF_CPU:
                return verb
        elif name in _OF_A_DEVICE and hasattr(torch.get_device_module(self.name), name):
            return getattr(torch.get_device_module(self.name), name)
        if hasattr(self._device, name):
            return getattr(self._device, name)
        if name not in _OF_TORCH:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        found = getattr(torch.get_device_module(self.name), name, None)
        if found is None:
            raise UnsupportedError(
                f"An accelerator has {name!r} if torch's module for its device has. Found no torch.{self.name}.{name}. "
                "Ask get_accelerator().name before."
            )
        return found

    @property
    def is_synchronous(self) -> bool:
        """Whether an operation has ended when the call returns."""
        return self._device.is_cpu

    def get_version(self) -> str:
        """Return the version of what drives the device.

        Returns:
            That of the toolkit torch was built for; an empty text for a CPU.
        """
        versions: Any = torch.version
        return str(getattr(versions, self.name, None) or "")

    def set_to_device(self, models: _M) -> _M:
        """Move models to the current device.

        Args:
            models: A model, or several.

        Returns:
            The same.
        """
        device = self._device.get_current_device()
        for each in [models] if isinstance(models, nn.Module) else models:
            each.to(device)
        return models

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> torch.autocast:
        """Compute in a lower precision inside a context, where torch holds that to be safe.

        Args:
            enabled: Whether it does.
            dtype: The precision.
            cache_enabled: Keep converted weights until the context ends.

        Returns:
            The context manager.
        """
        return torch.autocast(self.name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


@final
class CpuAccelerator(BaseAccelerator):
    """The CPU.

    Example:
        >>> from colossal.legacy.accelerator import CpuAccelerator
        >>> CpuAccelerator().is_synchronous
        True
    """

    def __init__(self) -> None:
        super().__init__(_device_of(type(self)))


@final
class CudaAccelerator(BaseAccelerator):
    """A GPU that torch drives by CUDA or ROCm.

    Raises:
        ConfigError: There is none here.

    Example:
        >>> from colossal.errors import ConfigError
        >>> from colossal.legacy.accelerator import CudaAccelerator
        >>> try:
        ...     name = CudaAccelerator().name
        ... except ConfigError:
        ...     name = "cpu"
        >>> name in ("cuda", "cpu")
        True
    """

    def __init__(self) -> None:
        super().__init__(_device_of(type(self)))


@final
class NpuAccelerator(BaseAccelerator):
    """A device that a package registers with torch as ``npu``.

    Raises:
        ConfigError: There is none here.

    Example:
        >>> from colossal.errors import ConfigError
        >>> from colossal.legacy.accelerator import NpuAccelerator
        >>> try:
        ...     name = NpuAccelerator().name
        ... except ConfigError:
        ...     name = "cpu"
        >>> name in ("npu", "cpu")
        True
    """

    def __init__(self) -> None:
        super().__init__(_device_of(type(self)))


def _device_of(kind: type[BaseAccelerator]) -> str:
    """The type of device that a class is named after."""
    return kind.__name__.removesuffix("Accelerator").lower()


_KINDS: Mapping[str, Callable[[], BaseAccelerator]] = {
    _device_of(kind): kind for kind in (CpuAccelerator, CudaAccelerator, NpuAccelerator)
}


def get_accelerator() -> BaseAccelerator:
    """Return the accelerator of this process, with the verbs of the older API.

    Returns:
        The accelerator.

    Raises:
        ConfigError: There is no such device here.

    Example:
        >>> from colossal.legacy.accelerator import get_accelerator
        >>> get_accelerator().get_current_device().type == get_accelerator().name
        True
    """
    name = today.get_accelerator().name
    return _KINDS.get(name, partial(BaseAccelerator, name))()


def set_accelerator(accelerator: BaseAccelerator | Accelerator | str) -> None:
    """Choose the accelerator of this process, as `colossal.accelerator.set_accelerator` does.

    Args:
        accelerator: The accelerator or its name.

    Raises:
        ConfigError: There is no such device here.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> from colossal.legacy.accelerator import CpuAccelerator, get_accelerator, set_accelerator
        >>> with mock.patch.dict(os.environ):
        ...     set_accelerator(CpuAccelerator())
        ...     print(get_accelerator().name)
        cpu
    """
    today.set_accelerator(accelerator if isinstance(accelerator, str) else accelerator.name)
