"""The process group of the pretend device: what NCCL is to a GPU.

It takes tensors of the device only, and of NCCL's dtypes. The values come from shared memory; in the device's own time
each collective runs on a stream of the group, after what was asked for before it, and whoever reads its result without
`wait` is told so.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist

import pretend_device

_NAMES = {  # of a method: which of its arguments are written to
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
_Work: Any = dist.Work


class PretendGroup(_ProcessGroup):
    """Ranks whose tensors are on the pretend device."""

    def __init__(self, options: Any) -> None:
        from colossal._src.comm._shm import create

        self._inner = create(options)
        super().__init__(self._inner.rank(), self._inner.size())
        self._name = options.group_id
        self._stream = torch.Stream(pretend_device.NAME)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return pretend_device.NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(pretend_device.NAME)]

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

    def carry_out(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> "PretendWork":
        """Run a method of the inner group on the same memory."""
        own = torch.Event(pretend_device.NAME)
        own.record(torch.accelerator.current_stream())
        self._stream.wait_event(own)
        for index, argument in enumerate(args):
            for tensor in _tensors_of(argument):
                _check(tensor)
                tensor.record_stream(self._stream)  # NCCL keeps what it uses until it is over
                pretend_device.native().touch(tensor, index in _NAMES[name], self._stream.stream_id, f"c10d::{name}")
        done = torch.Event(pretend_device.NAME)
        done.record(self._stream)
        work = getattr(self._inner, name)(*map(_on_host, args), **kwargs)
        return PretendWork(work, done, args, args[0] if _NAMES[name] else [])


class PretendWork(_Work):
    """A collective under way: a wait for it is one of the current stream."""

    def __init__(self, inner: Any, done: torch.Event, used: Sequence[Any], result: Any) -> None:
        super().__init__()
        self._inner, self._done, self._result = inner, done, result
        self._used = used  # as NCCL's, it keeps what it reads until it is over

    def wait(self, *args: Any) -> bool:
        over = self._inner.wait(*args)
        torch.accelerator.current_stream().wait_event(self._done)
        return over

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        is_over = self._inner.is_completed()
        if is_over:
            while not self._done.query():  # from now on the host knows
                pass
        return is_over

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device(pretend_device.NAME, 0)])
        self.wait()
        future.set_result(self._result)
        return future


def _method(name: str) -> Callable[..., PretendWork]:
    def method(self: PretendGroup, *args: Any, **kwargs: Any) -> PretendWork:
        return self.carry_out(name, args, kwargs)

    method.__name__ = name
    return method


for _name in _NAMES:
    setattr(PretendGroup, _name, _method(_name))


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each)


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type != pretend_device.NAME:
        raise RuntimeError(
            f"No backend type associated with device type {tensor.device.type}: a tensor of shape "
            f"{tuple(tensor.shape)} was passed to a collective of {pretend_device.NAME!r}"
        )
    if tensor.dtype not in _DTYPES and tensor.dtype not in _COMPLEX:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return pretend_device.native().host_alias(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_on_host, value))
    return value
