"""The step of Adam in one pass over memory, on the CPU and on GPUs of NVIDIA."""

from colossal.kernel.adam.op import adam_step
from colossal.kernel.adam.step import AdamStep
from colossal.kernel.adam.tensors import AdamTensors

__all__ = ["AdamStep", "AdamTensors", "adam_step"]
