"""The backend ``staged``: ranks that share a GPU, which NCCL refuses; for tests on machines with fewer GPUs than ranks.

torch loads it by the entry point ``torch.backends``, if this folder is on ``PYTHONPATH`` and ``COLOSSAL_SHARED_GPU`` is
set, and takes it where it would take NCCL. Kernels, streams and memory are those of the GPU. Collectives pass through
host memory, so nothing is said about their speed, nor about NCCL.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

NAME = "staged"
VARIABLE = "COLOSSAL_SHARED_GPU"


def register() -> None:
    """Make the backend the default of GPUs; called by torch's import where this folder is on the path."""
    if not os.environ.get(VARIABLE) or hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = NAME
    properties = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda *given: _Anonymous(properties(*given))


class _Anonymous:
    """The properties of a GPU but its identifier, by which ranks find out that they share it."""

    uuid = None

    def __init__(self, properties: Any) -> None:
        self._properties = properties

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)


def _create_group(options: Any, _: object = None) -> Any:
    from over_host import WRITTEN, GroupOverHost, map_tensors, tensors_of

    class StagedGroup(GroupOverHost):
        """Ranks whose tensors are on the same GPU, or on others."""

        def carry_out(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> "StagedWork":
            """Copy to the host, run a method of the inner group there, and let the work copy back."""
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []

            def staged(tensor: torch.Tensor, is_written: bool) -> torch.Tensor:
                self.check(tensor)
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                if is_written:
                    copies.append((tensor, host))
                return host

            on_host = [
                map_tensors(partial(staged, is_written=index in WRITTEN[name]), argument)
                for index, argument in enumerate(args)
            ]
            torch.cuda.current_stream().synchronize()
            work = getattr(self._inner, name)(*on_host, **kwargs)
            return StagedWork(work, copies, on_host, list(tensors_of(args[0])) if WRITTEN[name] else [])

    return StagedGroup(options, NAME, "cuda")


_Work: Any = dist.Work


class StagedWork(_Work):
    """A collective under way: its result is copied back by the stream that waits first."""

    def __init__(self, inner: Any, copies: list[tuple[torch.Tensor, torch.Tensor]], used: Any, result: Any) -> None:
        super().__init__()
        self._inner, self._copies, self._used, self._result = inner, copies, used, result
        self._done: torch.cuda.Event | None = None

    def wait(self, *args: Any) -> bool:
        over = self._inner.wait(*args)
        stream = torch.cuda.current_stream()
        if self._done is None:
            for tensor, host in self._copies:
                tensor.copy_(host, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(stream)
        else:
            stream.wait_event(self._done)
        return over

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        self.wait()
        assert self._done is not None
        self._done.synchronize()
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device("cuda", torch.cuda.current_device())])
        self.wait()
        future.set_result(self._result)
        return future
