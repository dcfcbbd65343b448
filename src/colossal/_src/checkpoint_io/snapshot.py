"""Copies in host memory: what lets training go on while a checkpoint is written."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from colossal._src.checkpoint_io.threads import map_in_threads
from colossal._src.kernel import huge_zeros, stream_copy

_ALIGN = 64
_HUGE_PAGE = 1 << 21
_CHUNK_BYTES = 1 << 22
_MAX_THREADS = 4
_STAGE_BYTES = 1 << 28


@final
class Arena:
    """Host memory that is kept from one copy to the next, so that only the first one pays for getting it."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = -(-max(num_bytes, 1) // _HUGE_PAGE) * _HUGE_PAGE
        self.pinned = pin
        if pin:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            (memory,) = huge_zeros([(self.num_bytes,)], torch.uint8)
        self._buffer = memory.numpy()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, one after the other, into the memory."""
        copies, at = [], 0
        for tensor in tensors:
            copies.append(self._allocate(at, tensor))
            at += _aligned(tensor.nbytes)
        on_host = [(t, c) for t, c in zip(tensors, copies, strict=True) if t.is_cpu]
        for tensor, copy in zip(tensors, copies, strict=True):
            if not tensor.is_cpu:
                copy.copy_(tensor, non_blocking=True)
        _copy_on_host(on_host)
        if len(on_host) < len(copies):
            torch.accelerator.synchronize()
        return copies

    def _allocate(self, at: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy, as a separate storage: a file in PyTorch's format holds each storage entirely."""
        if not like.nbytes:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        part = torch.frombuffer(self._buffer, dtype=torch.uint8, count=like.nbytes, offset=at)
        return part.view(like.dtype).view(like.shape)


@final
class Arenas:
    """The arenas of one `CheckpointIO`: each belongs to one save at a time."""

    def __init__(self) -> None:
        self._free: list[Arena] = []
        self._lock = threading.Lock()

    def take(self, tensors: Sequence[torch.Tensor]) -> Arena:
        """Return an arena with room for copies of tensors: the smallest free one that fits, or a new one."""
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        pin = not all(tensor.is_cpu for tensor in tensors)
        with self._lock:
            fitting = [arena for arena in self._free if arena.num_bytes >= num_bytes and arena.pinned == pin]
            if fitting:
                arena = min(fitting, key=lambda each: each.num_bytes)
                self._free.remove(arena)
                return arena
        return Arena(num_bytes, pin)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back, once its copies are not read any more."""
        with self._lock:
            self._free.append(arena)

    @contextmanager
    def on_host(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Lend copies in host memory of what is on a device; what is in host memory already comes as it is."""
        far = [tensor for tensor in tensors if not tensor.is_cpu]
        arena = self.take(far) if far else None
        try:
            copies = iter(arena.copy(far) if arena else ())
            yield [tensor if tensor.is_cpu else next(copies) for tensor in tensors]
        finally:
            if arena:
                self.give_back(arena)


def batches(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Split a list where copies of tensors on a device would take more host memory than a save may use."""
    begin = num_bytes = 0
    for at, tensor in enumerate(tensors):
        own = 0 if tensor.is_cpu else _aligned(tensor.nbytes)
        if num_bytes and num_bytes + own > _STAGE_BYTES:
            yield slice(begin, at)
            begin, num_bytes = at, 0
        num_bytes += own
    yield slice(begin, len(tensors))


def copy_regions_to_host(regions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies in host memory, each of its own; the host waits once for all of them."""
    copies = [
        torch.empty(region.shape, dtype=region.dtype, device="cpu", pin_memory=not region.is_cpu).copy_(
            region, non_blocking=True
        )
        for region in regions
    ]
    if not all(region.is_cpu for region in regions):
        torch.accelerator.synchronize()
    return copies


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _copy_on_host(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy with several threads: a single core does not use the full memory bandwidth."""
    chunks: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if not source.is_contiguous() or source.is_neg() or source.is_conj():
            target.copy_(source)
            continue
        for at in range(0, source.nbytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, source.nbytes - at)
            chunks.append((target.data_ptr() + at, source.data_ptr() + at, length))
    threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    chunks_per_thread = max(1, -(-len(chunks) // threads))
    map_in_threads(
        _move, [chunks[at : at + chunks_per_thread] for at in range(0, len(chunks), chunks_per_thread)], threads
    )


def _move(chunks: Sequence[tuple[int, int, int]]) -> None:
    for target, source, length in chunks:
        stream_copy(target, source, length)
