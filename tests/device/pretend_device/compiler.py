"""What torch.compile needs to know of the device: its kernels are those of the CPU, on its memory."""

from typing import Any

import torch
from torch._inductor.codegen.common import register_device_op_overrides
from torch._inductor.codegen.cpp import CppScheduling as Scheduling
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu as CppWrapperCodegen
from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as _PythonWrapper
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

__all__ = ["CppWrapperCodegen", "PythonWrapperCodegen", "Scheduling", "WrapperFxCodegen"]

register_device_op_overrides(torch._C._get_privateuse1_backend_name(), CpuDeviceOpOverrides())


class PythonWrapperCodegen(_PythonWrapper):
    """Writes the calls of kernels, which torch's own does for the devices that it knows."""

    @staticmethod
    def create(is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None) -> Any:
        if is_subgraph:
            return _PythonWrapper.create(is_subgraph, subgraph_name, parent_wrapper, partition_signatures)
        return PythonWrapperCodegen()

    def _generate_kernel_call_helper(self, kernel_name: str, call_args: Any, **_: Any) -> None:
        self.writeline(self.wrap_kernel_call(kernel_name, call_args))
