"""Copies between an accelerator and the memory of its host, while both go on computing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

# [Note: what a copy waits for, and what waits for it]
# A copy begins when what the device was asked for before has been done, on a stream of its own for each direction. The
# device waits for it where `order` is called, the host where `wait` is. Page-locked memory may be written again when
# the copy out of it is over: for what an optimizer updates that is so once the host has waited for the gradients of the
# next step, which were computed with what the copy brought. Memory that is not page-locked is copied at once.


@final
class CopyEvent:
    """A copy that is under way; by default one that is over."""

    def __init__(self, event: torch.Event | None = None) -> None:
        self._event = event

    def order(self) -> None:
        """Let what the device is asked for from now on begin after the copy."""
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)

    def wait(self) -> None:
        """Let the host wait for the copy; a second call does nothing."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


@final
class CopyStreams:
    """Two streams of a device: to it, and from it; none for host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[bool, torch.Stream] = {}

    def start(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """Begin to copy."""
        to_host = target.is_cpu
        if source.is_cpu == to_host or not (target if to_host else source).is_pinned():
            target.copy_(source)
            return CopyEvent()
        with self.on_stream(to_host=to_host):
            target.copy_(source, non_blocking=True)
            arrival = self.mark(to_host=to_host)
        # else the caching allocator might hand this memory out again while the copy on the other stream is using it
        (source if to_host else target).record_stream(self._stream(to_host))
        return arrival

    @contextmanager
    def on_stream(self, *, to_host: bool) -> Iterator[None]:
        """Run the operations inside on one of the streams, after those that the current stream already has."""
        if self._device.type == "cpu":
            yield
            return
        stream = self._stream(to_host)
        # what is copied may still be being computed
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            yield

    def mark(self, *, to_host: bool) -> CopyEvent:
        """Return what to wait for until all is over that one of the streams was asked for."""
        return CopyEvent() if self._device.type == "cpu" else CopyEvent(self._stream(to_host).record_event())

    def _stream(self, to_host: bool) -> torch.Stream:
        if to_host not in self._streams:
            self._streams[to_host] = torch.Stream(self._device)
        return self._streams[to_host]


def host_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a buffer in the memory of the host that a device copies to and from without anybody's waiting."""
    from colossal._src.zero.buffer_pool import zeros

    if device.type == "cpu":
        return zeros(numel, dtype, device)
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
