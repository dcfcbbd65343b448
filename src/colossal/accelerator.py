# pyright: reportUnknownMemberType=false
"""The device that this process computes on: thin over `torch.accelerator`, and the same verbs on a CPU."""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

import torch
from torch import distributed as dist

from colossal.errors import ConfigError

# [Note: the CPU is an accelerator]
# A CPU process has one device, synchronizes at once, and its memory is its resident set. Code that is written against
# these verbs runs on either, which is what lets a laptop run every tutorial. No other module names a type of device
# in order to compute on it: what torch calls the accelerator of this machine (a GPU of CUDA, ROCm or XPU, an NPU, or
# whatever a package registers as one) goes the same way.

_CPU = "cpu"
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@final
@dataclass(frozen=True)
class Accelerator:
    """One kind of device, and what a training program asks of it.

    Args:
        name: ``"cpu"``, or the type of the accelerator that torch finds here, such as ``"cuda"``, ``"xpu"`` or
            ``"npu"``.

    Raises:
        ConfigError: This machine or this build of torch has no such device.

    Example:
        >>> from colossal.accelerator import Accelerator
        >>> Accelerator("cpu").get_current_device()
        device(type='cpu')
    """

    name: str

    def __post_init__(self) -> None:
        here = _detect_accelerator()
        if self.name in (_CPU, here):
            return
        kinds = f"{_CPU!r} or {here!r}" if here else f"{_CPU!r}"
        build = "a CUDA build of torch and a driver" if self.name == "cuda" else f"a build of torch for {self.name!r}"
        raise ConfigError(
            f"The device must be one that torch finds here: {kinds}. Found {self.name!r} with torch "
            f"{torch.__version__}. Use 'cpu', or install {build}."
        )

    @property
    def is_cpu(self) -> bool:
        """Whether this is the CPU, which computes at once, in the host's memory."""
        return self.name == _CPU

    @property
    def communication_backend(self) -> str:
        """The backend of process groups on this device, as `torch.distributed` spells it."""
        return dist.get_default_backend_for_device(self.name)

    def device_count(self) -> int:
        """Count the devices that this process sees.

        Returns:
            The number of devices; 1 on a CPU.
        """
        return 1 if self.is_cpu else torch.accelerator.device_count()

    def get_current_device(self) -> torch.device:
        """Return the device for new tensors of this process.

        Returns:
            The device that `set_device` bound this process to; the first one if it was not called.
        """
        return torch.device(_CPU) if self.is_cpu else torch.device(self.name, torch.accelerator.current_device_index())

    def set_device(self, index: int) -> None:
        """Bind this process to a device.

        Args:
            index: Local rank of this process: the index of its device on this host. A process that sees a single
                device takes that one, as launchers that give each process its own show it no other. A CPU takes any.

        Raises:
            ConfigError: There is no such device.
        """
        if self.is_cpu:
            return
        count = self.device_count()
        if not 0 <= index < count and count != 1:
            raise ConfigError(
                f"Each process of a host needs a device of its own. Found local rank {index} and {count} devices of "
                f"type {self.name!r}. Start fewer processes on this host, or use the device 'cpu'."
            )
        torch.accelerator.set_device_index(0 if count == 1 else index)

    def identity(self) -> str | None:
        """Identify the current device among those of this host.

        Returns:
            The unique identifier that its driver reports; None on a CPU, and where a driver reports none.
        """
        ask = None if self.is_cpu else getattr(torch.get_device_module(self.name), "get_device_properties", None)
        uuid = None if ask is None else getattr(ask(torch.accelerator.current_device_index()), "uuid", None)
        return None if uuid is None else str(uuid)

    def synchronize(self) -> None:
        """Wait until everything that was started on the device has finished."""
        if not self.is_cpu:
            torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        """Give memory that torch holds in reserve back to the device."""
        if not self.is_cpu:
            torch.accelerator.empty_cache()

    def memory_allocated(self) -> int:
        """Measure the memory in use.

        Returns:
            Bytes: those of the tensors on an accelerator, the resident set of the process on a CPU.
        """
        return _resident_bytes()["VmRSS"] if self.is_cpu else torch.accelerator.memory_allocated()

    def max_memory_allocated(self) -> int:
        """Measure the most memory in use since the last `reset_peak_memory_stats`.

        Returns:
            Bytes, counted as by `memory_allocated`.
        """
        if not self.is_cpu:
            return torch.accelerator.max_memory_allocated()
        return max(_resident_bytes().values())  # the kernel brings the high-water mark up to date only now and then

    def available_memory(self) -> int | None:
        """Measure how much more memory tensors of this process could take on the device.

        Returns:
            Bytes: what the device has free, and what torch holds in reserve; None on a CPU.
        """
        if self.is_cpu:
            return None
        free, _ = torch.accelerator.get_memory_info()
        return free + torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()

    def reset_peak_memory_stats(self) -> None:
        """Begin a new peak; a CPU process whose system does not allow it keeps the old one."""
        if not self.is_cpu:
            torch.accelerator.reset_peak_memory_stats()
        else:
            with suppress(OSError):
                _CLEAR_REFS.write_text("5", encoding="ascii")

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators of the CPU and of this device.

        Args:
            seed: Any integer.
        """
        torch.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor | None:
        """Read the state of the device's own generator.

        Returns:
            Bytes, in host memory; None on a CPU, whose generator is torch's.
        """
        return None if self.is_cpu else torch.get_device_module(self.name).get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Let the device's own generator go on from a state.

        Args:
            state: What `get_rng_state` returned. A CPU takes none.
        """
        if not self.is_cpu:
            torch.get_device_module(self.name).set_rng_state(state)


@cache
def _accelerator(name: str) -> Accelerator:
    return Accelerator(name)


def get_accelerator(name: str | None = None) -> Accelerator:
    """Return the accelerator of this process.

    Args:
        name: ``"cpu"``, or the type of an accelerator such as ``"cuda"``. By default the environment variable
            ``COLOSSAL_DEVICE``, else the accelerator that torch finds, if there is one, else the CPU.

    Returns:
        The accelerator; the same object for the same device.

    Raises:
        ConfigError: There is no such device here.

    Example:
        >>> from colossal.accelerator import get_accelerator
        >>> cpu = get_accelerator("cpu")
        >>> cpu.communication_backend, cpu.device_count()
        ('gloo', 1)
        >>> cpu is get_accelerator("cpu")
        True
    """
    return _accelerator(name or os.environ.get("COLOSSAL_DEVICE") or _detect_accelerator() or _CPU)


def set_accelerator(accelerator: Accelerator | str) -> None:
    """Choose the accelerator of this process, and of those that it starts, before `launch`.

    Args:
        accelerator: The accelerator or its name, as of `get_accelerator`; the environment variable ``COLOSSAL_DEVICE``
            is set to it.

    Raises:
        ConfigError: There is no such device here.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> from colossal.accelerator import get_accelerator, set_accelerator
        >>> with mock.patch.dict(os.environ):
        ...     set_accelerator("cpu")
        ...     print(get_accelerator().name)
        cpu
    """
    chosen = get_accelerator(accelerator.name if isinstance(accelerator, Accelerator) else accelerator)
    os.environ["COLOSSAL_DEVICE"] = chosen.name


def auto_set_accelerator() -> None:
    """Choose the accelerator that torch finds, or the CPU, whatever was chosen before.

    Example:
        >>> import os
        >>> from unittest import mock
        >>> from colossal.accelerator import auto_set_accelerator, set_accelerator
        >>> with mock.patch.dict(os.environ):
        ...     set_accelerator("cpu")
        ...     auto_set_accelerator()
        ...     print("COLOSSAL_DEVICE" in os.environ)
        False
    """
    os.environ.pop("COLOSSAL_DEVICE", None)


def get_current_device() -> torch.device:
    """Return the device for new tensors of this process.

    Returns:
        The current device of `get_accelerator`.

    Example:
        >>> import torch
        >>> from colossal.accelerator import get_accelerator, get_current_device
        >>> batch = torch.zeros(2, device=get_current_device())
        >>> batch.device.type == get_accelerator().name
        True
    """
    return get_accelerator().get_current_device()


def _detect_accelerator() -> str | None:
    """Return the type of the accelerator of this machine, if it can be used."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _resident_bytes() -> dict[str, int]:
    """Return the resident set now (VmRSS) and at its highest (VmHWM)."""
    rows = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[0] in ("VmRSS:", "VmHWM:")}
