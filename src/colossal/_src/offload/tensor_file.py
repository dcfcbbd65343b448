"""Tensors that are stored in a file, and are read and written while the caller computes."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self, final

import torch

from colossal._src.offload.direct_io import DirectIO, probe
from colossal._src.offload.io_engine import END_OF_FILE, ENGINES, FileTransfer, IOEngine, open_io_engine
from colossal._src.offload.scratch_file import ScratchFile, padded
from colossal.errors import CheckpointError, ConfigError, ShapeError, UnsupportedError

_WORTH_A_PROBE = 64 << 20


@final
class FileRequest:
    """A transfer that may still be under way."""

    def __init__(self, flights: Any, what: str, tensor: torch.Tensor, transfer: Any) -> None:
        self._flights = flights
        self._what = what
        self._tensor: torch.Tensor | None = tensor  # its memory is in use until the transfer is over
        self._handle: object = None
        self._status: int | None = None
        self._is_reported = False
        self._lock = threading.Lock()
        flights.requests.append(self)  # before it begins: an interrupt in between must not free the tensor
        self._handle = flights.engine.submit(transfer)

    @property
    def is_done(self) -> bool:
        """Whether waiting would take no time."""
        self._flights.check_process()
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits for it
        try:
            if self._status is None and self._handle is not None:
                return self._flights.engine.is_done(self._handle)
            return self._status is not None
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Wait until the transfer is over; the tensor is the caller's again then."""
        status = self._settle()
        if status:
            self._is_reported = True
            reason = "the file ends too early" if status == END_OF_FILE else os.strerror(status)
            raise CheckpointError(
                f"Tensors that are kept on a disk must be {self._what} in full. Found in "
                f"{self._flights.file.directory}: {reason}. Look for the cause in the log of the "
                "system, and start again from the last checkpoint."
            ) from (OSError(status, reason) if status > 0 else None)

    def fails_unseen(self) -> bool:
        """Wait until the transfer is over, without raising its error."""
        return bool(self._settle()) and not self._is_reported

    def _settle(self) -> int:
        self._flights.check_process()
        with self._lock:
            if self._status is None and self._handle is not None:
                self._status = self._flights.engine.wait(self._handle)
                self._flights.engine.forget(self._handle)
                self._tensor = None
            return self._status or 0


@final
class _PendingRequests:
    """An open file, and what is under way to it and from it."""

    def __init__(self, file: ScratchFile, engine: IOEngine) -> None:
        self.file = file
        self.engine = engine
        self.process = os.getpid()
        self.is_closed = False
        self.requests: deque[FileRequest] = deque()
        self.failed: FileRequest | None = None
        self._lock = threading.Lock()

    def check_process(self) -> None:
        if self.process != os.getpid():
            raise UnsupportedError(
                "A file of tensors is used by the process that made it. Found another one, which was forked from it. "
                "Make a file of its own there."
            )

    def add(self, what: str, tensor: torch.Tensor, transfer: FileTransfer) -> FileRequest:
        self.check_process()
        with self._lock:
            if self.is_closed:
                raise UnsupportedError(
                    "A file of tensors must be open to be used. Found that it was closed. Close it after its last use."
                )
            while self.requests and self.requests[0].is_done:
                self._note(self.requests.popleft())
            return FileRequest(self, what, tensor, transfer)

    def _note(self, request: FileRequest) -> None:
        if self.failed is None and request.fails_unseen():
            self.failed = request

    def close(self) -> None:
        """Wait for all requests and free everything; in a forked process, do nothing."""
        if self.process != os.getpid():
            return
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            for request in self.requests:
                self._note(request)
            self.engine.close()
            self.requests.clear()
            self.file.close()


@final
class TensorFile:
    """A file with a slot for each of some tensors, read and written in the background.

    Large transfers are split into chunks, of which several are under way at a time. They use or bypass the page cache
    of the system, in each direction whichever a short probe of the disk found to be faster. Only complete blocks in
    memory that begins at a multiple of 4096 can bypass it; anything else goes through the page cache.

    The file has no name, so the processes of a job may use the same directory, and nothing is left of it when the
    process ends, in whatever way. A process that is forked from this one must not use it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        slot_sizes: Sequence[int],
        engine: str | None = None,
        direct: DirectIO | None = None,
    ) -> None:
        if engine not in (None, *ENGINES) or min(slot_sizes, default=0) < 0:
            raise ConfigError(
                f"A file of tensors takes sizes from 0 and an engine out of {', '.join(ENGINES)}. Found engine "
                f"{engine!r} and sizes from {min(slot_sizes, default=0)}. Leave engine out to use the "
                "first of these that works here, and pass no size below 0."
            )
        self.slot_sizes = tuple(slot_sizes)
        self._offsets = [0, *accumulate(map(padded, self.slot_sizes))]
        self.num_bytes = self._offsets[-1]
        opened = open_io_engine(engine)
        try:
            if direct is None:
                is_large = self.num_bytes >= _WORTH_A_PROBE
                direct = probe(directory, opened) if is_large else DirectIO(read=False, write=False)
            self.direct = direct
            self._flights = _PendingRequests(ScratchFile(directory, self.num_bytes), opened)
        except BaseException:
            opened.close()
            raise
        # of the requests, not of this object, which a method of its own would keep alive
        self._finalizer = weakref.finalize(self, self._flights.close)

    @property
    def engine(self) -> str:
        """The name of the engine in use."""
        return self._flights.engine.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._finalizer()

    def write(self, slot: int, tensor: torch.Tensor) -> FileRequest:
        """Begin to write a tensor into a slot.

        Requests are carried out in any order: wait for one before the next to the same slot.
        """
        return self._begin(slot, tensor, "written")

    def read(self, slot: int, into: torch.Tensor) -> FileRequest:
        """Begin to read a tensor from a slot."""
        return self._begin(slot, into, "read")

    def close(self) -> None:
        """Wait for what is under way and free the disk space; later calls do nothing."""
        self._finalizer()
        # a write that failed before anyone waited for it must not go unnoticed
        failed, self._flights.failed = self._flights.failed, None
        if failed is not None and failed.fails_unseen():
            failed.wait()

    def _begin(self, slot: int, tensor: torch.Tensor, what: str) -> FileRequest:
        size = self.slot_sizes[slot]
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes > size:
            kind = "" if tensor.is_contiguous() else ", not contiguous"
            raise ShapeError(
                f"Slot {slot} takes a contiguous tensor on the CPU of at most {size} bytes. Found {tensor.nbytes} "
                f"bytes on {tensor.device}{kind}. Convert it, or make a file with larger slots."
            )
        file, is_write = self._flights.file, what == "written"
        descriptor = file.direct if (self.direct.write if is_write else self.direct.read) else file.buffered
        offset = self._offsets[slot % len(self.slot_sizes)]
        transfer = FileTransfer(tensor.data_ptr(), offset, tensor.nbytes, file.buffered, descriptor, is_write)
        return self._flights.add(what, tensor.detach(), transfer)
