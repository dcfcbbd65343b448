"""The process group of the pretend device: what NCCL is to a GPU.

In the device's own time each collective runs on a stream of the group, after what was asked for before it, and whoever
reads its result without `wait` is told so.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from over_host import WRITTEN, GroupOverHost, map_tensors, tensors_of
from torch import distributed as dist

import pretend_device

_Work: Any = dist.Work


class PretendGroup(GroupOverHost):
    """Ranks whose tensors are on the pretend device."""

    def __init__(self, options: Any) -> None:
        super().__init__(options, pretend_device.NAME, pretend_device.NAME)
        self._stream = torch.Stream(pretend_device.NAME)

    def carry_out(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> "PretendWork":
        """Run a method of the inner group on the same memory."""
        own = torch.Event(pretend_device.NAME)
        own.record(torch.accelerator.current_stream())
        self._stream.wait_event(own)
        for index, argument in enumerate(args):
            for tensor in tensors_of(argument):
                self.check(tensor)
                tensor.record_stream(self._stream)  # NCCL keeps what it uses until it is over
                pretend_device.native().touch(tensor, index in WRITTEN[name], self._stream.stream_id, f"c10d::{name}")
        done = torch.Event(pretend_device.NAME)
        done.record(self._stream)
        on_host = partial(map_tensors, pretend_device.native().host_alias)
        work = getattr(self._inner, name)(*map(on_host, args), **kwargs)
        return PretendWork(work, done, args, args[0] if WRITTEN[name] else [])


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
