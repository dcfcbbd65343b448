"""Copies in host memory: what lets training go on while a checkpoint is written."""

import os
import threading
from collections.abc import Sequence
from typing import final

import torch

from colossal.checkpoint_io.parallel import in_threads
from colossal.kernel import huge_zeros, stream_copy

_ALIGN = 64
_HUGE_PAGE = 1 << 21
_PIECE_BYTES = 1 << 22
_MAX_THREADS = 4


@final
class Arena:
    """Host memory that is kept from one copy to the next, so that only the first one pays for getting it.

    Args:
        num_bytes: Its size.
        pin: Page-lock the memory, from which a GPU copies faster.
    """

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = -(-max(num_bytes, 1) // _HUGE_PAGE) * _HUGE_PAGE
        self.pinned = pin
        if pin:
            self.memory = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            (self.memory,) = huge_zeros([(self.num_bytes,)], torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, one after the other, into the memory.

        Args:
            tensors: On any device; `room_for` of them fits into the arena.

        Returns:
            The copies, which are the arena's until the next call.
        """
        copies, at = [], 0
        for tensor in tensors:
            part = self.memory[at : at + tensor.nbytes]
            copies.append(part.view(tensor.dtype).view(tensor.shape))
            at += _aligned(tensor.nbytes)
        on_host = [(t, c) for t, c in zip(tensors, copies, strict=True) if t.device.type == "cpu"]
        for tensor, copy in zip(tensors, copies, strict=True):
            if tensor.device.type != "cpu":
                copy.copy_(tensor, non_blocking=True)
        _copy_on_host(on_host)
        if len(on_host) < len(copies):
            torch.accelerator.synchronize()
        return copies


@final
class Arenas:
    """The arenas of one `CheckpointIO`: each belongs to one save at a time."""

    def __init__(self) -> None:
        self._free: list[Arena] = []
        self._lock = threading.Lock()

    def take(self, tensors: Sequence[torch.Tensor]) -> Arena:
        """Return an arena with room for copies of tensors: the smallest free one that fits, or a new one.

        Args:
            tensors: What is to be copied.
        """
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        pin = any(tensor.device.type != "cpu" for tensor in tensors)
        with self._lock:
            fitting = [arena for arena in self._free if arena.num_bytes >= num_bytes and arena.pinned == pin]
            if fitting:
                arena = min(fitting, key=lambda each: each.num_bytes)
                self._free.remove(arena)
                return arena
        return Arena(num_bytes, pin)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back, once nobody reads the copies in it any more.

        Args:
            arena: The arena.
        """
        with self._lock:
            self._free.append(arena)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _copy_on_host(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy by several threads: one core alone does not use the whole bandwidth of the memory."""
    pieces: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if not source.is_contiguous() or source.is_neg() or source.is_conj():
            target.copy_(source)
            continue
        for at in range(0, source.nbytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, source.nbytes - at)
            pieces.append((target.data_ptr() + at, source.data_ptr() + at, length))
    threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    share = max(1, -(-len(pieces) // threads))
    in_threads(_move, [pieces[at : at + share] for at in range(0, len(pieces), share)], threads)


def _move(pieces: Sequence[tuple[int, int, int]]) -> None:
    for target, source, length in pieces:
        stream_copy(target, source, length)
