# pyright: reportUnknownMemberType=false
"""The device that this process computes on: thin over `torch.accelerator`, and the same verbs on a CPU."""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

import torch

from colossal.errors import ConfigError

# [Note: the CPU is an accelerator]
# A CPU process has one device, synchronises at once, and its memory is its resident set. Code that is written against
# these verbs runs on either, which is what lets a laptop run every tutorial.

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@final
@dataclass(frozen=True)
class Accelerator:
    """One kind of device, and what a training program asks of it.

    Args:
        name: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: This machine or this build of torch has no such device.

    Example:
        >>> from colossal.accelerator import Accelerator
        >>> Accelerator("cpu").get_current_device()
        device(type='cpu')
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in _BACKENDS:
            raise ConfigError(f"A device is one of {', '.join(_BACKENDS)}. Found {self.name!r}. Pass one of them.")
        if self.name == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "The device 'cuda' needs a GPU and a CUDA build of torch. Found "
                f"torch {torch.__version__} without a usable GPU. Use 'cpu', or install a CUDA build."
            )

    @property
    def communication_backend(self) -> str:
        """The backend of process groups on this device, as `torch.distributed` spells it."""
        return _BACKENDS[self.name]

    def device_count(self) -> int:
        """Count the devices that this process sees.

        Returns:
            The number of GPUs; 1 on a CPU.
        """
        return torch.cuda.device_count() if self.name == "cuda" else 1

    def get_current_device(self) -> torch.device:
        """Tell where new tensors of this process belong.

        Returns:
            The device that `set_device` bound this process to; the first one if it was not called.
        """
        return torch.device("cuda", torch.cuda.current_device()) if self.name == "cuda" else torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Bind this process to a device.

        Args:
            index: Index of the device on this host; a CPU takes any.

        Raises:
            ConfigError: There is no such device.
        """
        if self.name == "cpu":
            return
        if not 0 <= index < self.device_count():
            raise ConfigError(
                f"Each process of a host needs a GPU of its own. Found local rank {index} and "
                f"{self.device_count()} GPUs. Start fewer processes on this host, or use the device 'cpu'."
            )
        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        """Wait until everything that was started on the device has finished."""
        if self.name == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give memory that torch holds in reserve back to the device."""
        if self.name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        """Measure the memory in use.

        Returns:
            Bytes: those of the tensors on a GPU, the resident set of the process on a CPU.
        """
        return torch.cuda.memory_allocated() if self.name == "cuda" else _resident_bytes()["VmRSS"]

    def max_memory_allocated(self) -> int:
        """Measure the most memory in use since the last `reset_peak_memory_stats`.

        Returns:
            Bytes, counted as by `memory_allocated`.
        """
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(_resident_bytes().values())  # the kernel brings the high-water mark up to date only now and then

    def reset_peak_memory_stats(self) -> None:
        """Begin a new peak; a CPU process whose system does not allow it keeps the old one."""
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):
                _CLEAR_REFS.write_text("5", encoding="ascii")

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators of the CPU and of this device.

        Args:
            seed: Any integer.
        """
        torch.manual_seed(seed)


@cache
def _accelerator(name: str) -> Accelerator:
    return Accelerator(name)


def get_accelerator(name: str | None = None) -> Accelerator:
    """Return the accelerator of this process.

    Args:
        name: ``"cpu"`` or ``"cuda"``. By default the environment variable ``COLOSSAL_DEVICE``, else a GPU if there is
            one, else the CPU.

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
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return _accelerator(name or os.environ.get("COLOSSAL_DEVICE") or default)


def get_current_device() -> torch.device:
    """Tell where new tensors of this process belong.

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


def _resident_bytes() -> dict[str, int]:
    """Return the resident set now (VmRSS) and at its highest (VmHWM)."""
    rows = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[0] in ("VmRSS:", "VmHWM:")}
