"""The device of this process with the verbs of the older API; `colossalai.accelerator` is this module."""

from colossal._src.legacy.accelerator import (
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
