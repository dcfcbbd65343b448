"""The library of collectives and messages, through its plain C interface (``csrc/cpu/shm.cpp``)."""

import ctypes
import os
import threading
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any, final

import torch

from colossal._src._native import library
from colossal._src.comm._shm.fault import Detail, FaultKind, explain

REDUCTIONS = ("sum", "avg", "max", "min")
"""What can be done with numbers, by the library's number."""

OTHER_REDUCTIONS = ("product", "band", "bor", "bxor", "premul_sum")
"""Torch's other reductions, with the numbers that follow."""

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
"""The dtypes that the library can reduce, by its numbers; it moves all others."""

# Sorted by name: the order of a set depends on addresses, which differ between processes.
_ALL_DTYPES = (*DTYPES, *sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)} - {*DTYPES}, key=str))
CODES = {dtype: number for number, dtype in enumerate(_ALL_DTYPES)}
"""A number for each dtype, so that ranks can compare them."""

# With fewer cores than ranks, one that spins keeps another from running, so it soon sleeps instead.
_SPINS, _CROWDED_SPINS = 1000, 20  # of some 50 ns, with a core for each rank and without
_PENDING, _DELIVERED = 0, 1


class Kind(IntEnum):
    """The collectives."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    REDUCE = 3
    ALL_GATHER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    SCATTER = 7
    GATHER = 8


class _Call(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("root", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("is_uneven", ctypes.c_uint32),
        ("is_elsewhere", ctypes.c_uint32),
        ("unused", ctypes.c_uint64 * 4),
    )


class _CollectiveOrder(ctypes.Structure):
    _fields_ = (
        ("call", _Call),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("splits", ctypes.c_void_p),
        ("item", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_int64),
        ("unused", ctypes.c_uint64 * 3),
    )


class _Detail(ctypes.Structure):
    _fields_ = (
        ("ranks", ctypes.c_uint64),
        ("parity", ctypes.c_uint32),
        ("origin", ctypes.c_uint32),
        ("target", ctypes.c_uint32),
        ("tag", ctypes.c_uint32),
        ("sent_dtype", ctypes.c_uint32),
        ("expected_dtype", ctypes.c_uint32),
        ("sent_bytes", ctypes.c_uint64),
        ("expected_bytes", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
    )


_P, _I, _U, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bytes": (_L, (_U,)),
    "max_ranks": (_U, ()),
    "best_isa": (_U, ()),
    "open": (_P, (_I, _U, _U, _P, _I, _U)),
    "leave": (None, (_P,)),
    "close": (None, (_P,)),
    "run": (_I, (_P, _P)),
    "fault": (_U, (_P, _P, _P)),
    "call": (None, (_P, _U, _U, _P)),
    "send": (_P, (_P, _U, _U, _U, _P, _L)),
    "receive": (_P, (_P, ctypes.c_int32, _U, _U, _P, _L)),
    "look": (_I, (_P, _P)),
    "state": (_I, (_P,)),
    "wait": (_I, (_P, _P, ctypes.c_int64)),
    "source": (ctypes.c_int32, (_P,)),
    "release": (None, (_P, _P)),
}


@cache
def functions() -> dict[str, Any]:
    """Return the library's functions, by the last part of their names; UnsupportedError if it cannot be built."""
    found: dict[str, Any] = {}
    loaded = library("cpu/shm")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"colossal_shm_{name}")
        function.restype, function.argtypes = result, arguments
        found[name] = function
    return found


def instruction_set() -> str:
    """Name the widest instructions that reductions use on this processor."""
    widest: int = functions()["best_isa"]()
    return ("portable code", "AVX2", "AVX-512")[widest]


@final
class SharedMemoryEngine:
    """One rank's end of a group's shared memory.

    Collectives are run one after another; messages may be sent and awaited by any number of threads. Every wait ends
    within its timeout, in a `CommunicationError` that says whose fault it is; after that the group is broken for good.
    """

    def __init__(self, descriptor: int, rank: int, pids: Sequence[int], global_ranks: Sequence[int]) -> None:
        self.rank, self.size = rank, len(pids)
        self._global_ranks, self._pids = global_ranks, pids
        self._c = functions()
        spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else _CROWDED_SPINS
        numbers = (ctypes.c_int * self.size)(*pids)
        self._handle: int | None = self._c["open"](descriptor, rank, self.size, numbers, spins, self._c["best_isa"]())
        if not self._handle:
            raise MemoryError(f"Shared memory for {self.size} ranks could not be mapped.")
        # The order holds only the addresses of these arrays: they must live as long as the engine.
        self._inputs, self._outputs = (_P * self.size)(), (_P * self.size)()
        self._splits = (_L * (2 * self.size))()
        self._order = _CollectiveOrder(inputs=ctypes.addressof(self._inputs), outputs=ctypes.addressof(self._outputs))
        self._call, self._address = self._order.call, ctypes.addressof(self._order)
        self._turn = threading.Lock()
        self._abandoned: list[object] = []

    def __del__(self) -> None:
        """Unmap the memory once no thread is in a call."""
        # The constructor may have raised before there was a handle.
        if getattr(self, "_handle", None):
            self._c["close"](self._handle)
            self._handle = None

    def run(
        self,
        kind: Kind,
        dtype: torch.dtype,
        count: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        seconds: float,
        reduction: int = 0,
        root: int = -1,
        splits: Sequence[int] | None = None,
        *,
        is_elsewhere: bool = False,
    ) -> None:
        """Run a collective, addresses in and addresses out; CommunicationError if it, or the group, is broken.

        One that is done elsewhere is only agreed upon.
        """
        order, call = self._order, self._call
        # All threads of this rank fill the same arrays, and the ranks number collectives by the order of these calls.
        with self._turn:
            call.kind, call.dtype, call.reduction, call.root = kind, CODES[dtype], reduction, root
            call.count, call.is_uneven, call.is_elsewhere = count, splits is not None, is_elsewhere
            self._inputs[: len(inputs)] = inputs
            self._outputs[: len(outputs)] = outputs
            if splits is not None:
                self._splits[:] = splits
                order.splits = ctypes.addressof(self._splits)
            order.item, order.timeout_ns = dtype.itemsize, int(seconds * 1e9)
            is_done = self._c["run"](self._handle, self._address)
        if not is_done:
            raise explain(*self._fault(), self._global_ranks, self._pids, seconds, Kind(kind))

    def send(self, to: int, tag: int, tensor: torch.Tensor) -> int:
        """Begin to send a tensor; returns the message's number."""
        code, num_bytes = CODES[tensor.dtype], tensor.numel() * tensor.itemsize
        return int(self._c["send"](self._handle, to, tag, code, tensor.data_ptr(), num_bytes))

    def receive(self, origin: int, tag: int, tensor: torch.Tensor) -> int:
        """Begin to receive a tensor, from anybody if the origin is -1; returns the message's number."""
        code, num_bytes = CODES[tensor.dtype], tensor.numel() * tensor.itemsize
        return int(self._c["receive"](self._handle, origin, tag, code, tensor.data_ptr(), num_bytes))

    def is_over(self, message: int) -> bool:
        """Make progress, and return whether a message has arrived or was sent, or never will be."""
        return bool(self._c["look"](self._handle, message) != _PENDING)

    def wait(self, message: int, seconds: float) -> None:
        """Wait until a message has arrived, or was put down; CommunicationError if that fails."""
        if not self._c["wait"](self._handle, message, int(seconds * 1e9)):
            raise explain(*self._fault(), self._global_ranks, self._pids, seconds, None)

    def source(self, message: int) -> int:
        """Return the rank that a message came from."""
        return int(self._c["source"](message))

    def release(self, message: int, content: object) -> None:
        """Forget a message; one that is under way stays, and its content with it."""
        if self._handle is None:  # in a cycle, that of an error and its frames, the collector may have taken us first
            return
        if self._c["state"](message) == _DELIVERED:
            self._c["release"](self._handle, message)
        else:
            # The library still uses the tensor's address when the peer moves the message: it must not be freed.
            self._abandoned.append(content)

    def leave(self) -> None:
        """Leave the group; other ranks that wait for this one get an error."""
        self._c["leave"](self._handle)

    def _fault(self) -> tuple[FaultKind, Detail]:
        finder, detail = ctypes.c_uint32(self.rank), _Detail()
        kind = FaultKind(self._c["fault"](self._handle, ctypes.byref(finder), ctypes.byref(detail)))
        calls: list[str] = []
        # Calls are announced in slots of alternate steps; the parity says which slot still has those that differed.
        if kind is FaultKind.MISMATCH:
            for rank in range(self.size):
                call = _Call()
                self._c["call"](self._handle, rank, detail.parity, ctypes.byref(call))
                calls.append(_describe(call, self._global_ranks))
        ranks = [rank for rank in range(self.size) if detail.ranks >> rank & 1]
        return kind, Detail(
            self.rank, finder.value, ranks, calls, detail.origin, detail.target, detail.tag,
            detail.sent_bytes, detail.expected_bytes,
            _dtype_name(detail.sent_dtype), _dtype_name(detail.expected_dtype),
        )  # fmt: skip


def _dtype_name(code: int) -> str:
    return str(_ALL_DTYPES[code]).removeprefix("torch.") if code < len(_ALL_DTYPES) else f"dtype {code}"


def _describe(call: _Call, global_ranks: Sequence[int]) -> str:
    kind = Kind(call.kind)
    if kind is Kind.BARRIER:
        return "barrier"
    words = [f"{kind.name.lower()} of {call.count} x {_dtype_name(call.dtype)}"]
    if call.is_uneven:
        words = [f"{kind.name.lower()} of uneven parts of {_dtype_name(call.dtype)}"]
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE):
        words.append(f"by {(REDUCTIONS + OTHER_REDUCTIONS)[call.reduction]}")
    if call.root >= 0:
        words.append(f"with root {global_ranks[call.root]}")
    return " ".join(words)
