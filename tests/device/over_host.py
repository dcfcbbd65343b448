"""A process group of an accelerator whose collectives pass through host memory: what tests put in NCCL's place.

It takes what NCCL takes: tensors of the device only, contiguous, and of NCCL's dtypes. The values go through shared
memory, by the group of the backend ``shm``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist

WRITTEN = {  # of a method: which of its arguments are written to
    "allreduce": (0,), "allreduce_coalesced": (0,), "reduce": (0,), "broadcast": (0,), "reduce_scatter": (0,),
    "reduce_scatter_single": (0,), "reduce_scatter_single_coalesced": (0,), "allgather": (0,),
    "all_gather_single": (0,), "all_gather_single_coalesced": (0,), "allgather_coalesced": (0,), "gather": (0,),
    "scatter": (0,), "all_to_all_single": (0,), "alltoall": (0,), "send": (), "recv": (0,), "recv_anysource": (0,),
    "_allgather_base": (0,), "_reduce_scatter_base": (0,), "alltoall_base": (0,),
    "allgather_into_tensor_coalesced": (0,), "reduce_scatter_tensor_coalesced": (0,),
}  # fmt: skip
_DTYPES = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_COMPLEX = {torch.complex64, torch.complex128}
_ProcessGroup: Any = dist.ProcessGroup


class GroupOverHost(_ProcessGroup):
    """Ranks whose tensors are on a device; a subclass says how a collective gets to them.

    Args:
        options: What torch hands to a backend.
        backend: Name of the backend.
        device: Type of the device.
    """

    def __init__(self, options: Any, backend: str, device: str) -> None:
        from colossal._src.comm._shm import create

        self._inner = create(options)
        super().__init__(self._inner.rank(), self._inner.size())
        self._name, self._backend, self._device = options.group_id, backend, device

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device)]

    @property
    def group_name(self) -> Any:
        return self._name

    def get_group_store(self) -> Any:
        return self._inner.get_group_store()

    def set_timeout(self, timeout: Any) -> None:
        self._inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self._inner.shutdown()

    abort = shutdown

    def barrier(self, opts: Any = None) -> Any:
        return self._inner.barrier(opts)

    def carry_out(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method of the inner group, and return the work that is under way."""
        raise NotImplementedError

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse what NCCL refuses."""
        if tensor.device.type != self._device:
            raise RuntimeError(
                f"No backend type associated with device type {tensor.device.type}: a tensor of shape "
                f"{tuple(tensor.shape)} was passed to a collective of {self._backend!r}"
            )
        if tensor.dtype not in _DTYPES and tensor.dtype not in _COMPLEX:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")


def _method(name: str) -> Callable[..., Any]:
    def method(self: GroupOverHost, *args: Any, **kwargs: Any) -> Any:
        return self.carry_out(name, args, kwargs)

    method.__name__ = name
    return method


for _name in WRITTEN:
    setattr(GroupOverHost, _name, _method(_name))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same argument with other tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, each) for each in value)
    return value
