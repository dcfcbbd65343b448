"""The ways to read and write a file while the caller does something else."""

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple, cast, final

from colossal._src._native import library
from colossal._src.offload.scratch_file import BLOCK
from colossal.errors import UnsupportedError

END_OF_FILE = -1
"""The status of a transfer that met the end of the file; other statuses are 0 and the system's error numbers."""

_DEPTH = 16
_THREADS = 4
_SPAN = 1 << 22


class FileTransfer(NamedTuple):
    """What is moved between memory and a file."""

    address: int  # where the memory begins
    offset: int  # where in the file
    num_bytes: int  # how much
    buffered: int  # a descriptor of the file that goes through the page cache
    direct: int  # one that goes past it where address and offset allow that; or `buffered` again
    is_write: bool  # whether to the file

    @property
    def num_direct_bytes(self) -> int:
        """How many of its bytes can bypass the page cache: all complete blocks, or nothing."""
        return 0 if (self.address | self.offset) % BLOCK else self.num_bytes - self.num_bytes % BLOCK


class IOEngine(ABC):
    """Runs transfers in the background, large ones as several concurrent chunks."""

    name: str  # one of `ENGINES`

    @abstractmethod
    def submit(self, transfer: FileTransfer) -> object:
        """Begin a transfer."""

    @abstractmethod
    def is_done(self, handle: object) -> bool:
        """Return whether the transfer is over, so that `wait` returns at once."""

    @abstractmethod
    def wait(self, handle: object) -> int:
        """Wait until a transfer is over."""

    @abstractmethod
    def forget(self, handle: object) -> None:
        """Free a handle."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and end all threads."""


class _TransferOrder(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("offset", "bytes")),
        *((name, ctypes.c_int32) for name in ("buffered", "direct", "is_write", "padding")),
    )


@cache
def _functions() -> ctypes.CDLL:
    functions = library("cpu/tensor_file")
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("ring", pointer, (ctypes.c_uint32,)),
        ("pool", pointer, (ctypes.c_uint32,)),
        ("submit", pointer, (pointer, pointer)),
        ("is_done", ctypes.c_int32, (pointer, pointer)),
        ("wait", ctypes.c_int32, (pointer, pointer)),
        ("forget", None, (pointer,)),
        ("close", None, (pointer,)),
    ):
        function = functions[f"colossal_file_{name}"]
        function.argtypes, function.restype = arguments, result
        setattr(functions, name, function)
    return functions


@final
class NativeIOEngine(IOEngine):
    """Threads of C++, or one that serves a ring which the kernel reads requests from."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._functions = _functions()
        self._engine = self._functions.ring(_DEPTH) if name == "io_uring" else self._functions.pool(_THREADS)
        if not self._engine:
            raise UnsupportedError(
                f"The engine {name!r} must be allowed by the system. Found that it is not: the kernel is too old, a "
                "sandbox forbids it, or there are too many threads. Leave the choice of the engine to the library."
            )

    def submit(self, transfer: FileTransfer) -> object:
        """Begin a transfer."""
        one = transfer
        order = _TransferOrder(one.address, one.offset, one.num_bytes, one.buffered, one.direct, one.is_write)
        return self._functions.submit(self._engine, ctypes.byref(order))

    def is_done(self, handle: object) -> bool:
        """Return whether the transfer is over, so that `wait` returns at once."""
        return bool(self._functions.is_done(self._engine, handle))

    def wait(self, handle: object) -> int:
        """Wait until a transfer is over."""
        return self._functions.wait(self._engine, handle)

    def forget(self, handle: object) -> None:
        """Free a handle."""
        self._functions.forget(handle)

    def close(self) -> None:
        """Finish what is under way and end all threads."""
        self._functions.close(self._engine)


@final
class PythonIOEngine(IOEngine):
    """Threads of the interpreter, for where nothing can be compiled."""

    name = "python"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="colossal-file")

    def submit(self, transfer: FileTransfer) -> object:
        """Begin a transfer."""
        edge, end = transfer.num_direct_bytes, transfer.num_bytes
        parts = ((transfer.direct, 0, edge), (transfer.buffered, edge, end))
        spans = [(with_, at, min(at + _SPAN, to)) for with_, start, to in parts for at in range(start, to, _SPAN)]
        return [self._threads.submit(_move, transfer, *span) for span in spans]

    def is_done(self, handle: object) -> bool:
        """Return whether the transfer is over, so that `wait` returns at once."""
        return all(future.done() for future in _futures(handle))

    def wait(self, handle: object) -> int:
        """Wait until a transfer is over."""
        return next(filter(None, [future.result() for future in _futures(handle)]), 0)

    def forget(self, handle: object) -> None:
        """Free a handle."""
        _futures(handle).clear()

    def close(self) -> None:
        """Finish what is under way and end all threads."""
        self._threads.shutdown()


def _futures(handle: object) -> list[Future[int]]:
    assert isinstance(handle, list)
    return cast("list[Future[int]]", handle)


def _move(transfer: FileTransfer, descriptor: int, start: int, end: int) -> int:
    """Move the bytes from start to end; return the status."""
    while start < end:
        memory = (ctypes.c_char * (end - start)).from_address(transfer.address + start)
        call: Callable[..., int] = os.pwritev if transfer.is_write else os.preadv
        try:
            moved = call(descriptor, [memory], transfer.offset + start)
        except OSError as error:
            if error.errno != errno.EINVAL or descriptor == transfer.buffered:
                return error.errno or errno.EIO
            descriptor = transfer.buffered  # a file system with rules of its own
            continue
        if not moved:
            return errno.EIO if transfer.is_write else END_OF_FILE
        start += moved
        # from the middle of a block no direct transfer can go on
        descriptor = transfer.buffered if moved % BLOCK else descriptor
    return 0


ENGINES: dict[str, Callable[[], IOEngine]] = {
    "io_uring": lambda: NativeIOEngine("io_uring"),
    "threads": lambda: NativeIOEngine("threads"),
    "python": PythonIOEngine,
}
"""How each engine is opened, the best first."""


def open_io_engine(name: str | None = None) -> IOEngine:
    """Open an engine."""
    if name is not None:
        return ENGINES[name]()
    for opener in ENGINES.values():
        try:
            return opener()
        except UnsupportedError:
            continue
    raise AssertionError("the last engine is always allowed")
