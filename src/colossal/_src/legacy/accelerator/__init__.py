"""Devices with the verbs of the older API."""

from colossal._src.legacy.accelerator.device_verbs import (
    BaseAccelerator,
    CpuAccelerator,
    CudaAccelerator,
    NpuAccelerator,
    get_accelerator,
    set_accelerator,
)

__all__ = [
    "BaseAccelerator",
    "CpuAccelerator",
    "CudaAccelerator",
    "NpuAccelerator",
    "get_accelerator",
    "set_accelerator",
]
