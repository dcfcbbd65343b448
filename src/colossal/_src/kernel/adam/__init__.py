"""The step of Adam in one pass over memory, on the CPU and on GPUs of NVIDIA."""

from colossal._src.kernel.adam.op import adam_step
from colossal._src.kernel.adam.reference import reference_adam_step
from colossal._src.kernel.adam.step import AdamStep, AdamTensors

__all__ = [
    "AdamStep",
    "AdamTensors",
    "adam_step",
    "reference_adam_step",
]
