"""What functions of our own C++ share that go over tensors in host memory: one record, its dtype, threads, vectors."""

import ctypes
from functools import cache
from typing import Protocol

import torch

from colossal._src._native import library
from colossal.errors import UnsupportedError

CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float64: 3}
"""Of the dtypes that are computed with, in float32, and in float64 of float64."""

WIDEST_VECTORS = 2
"""Of the processor; 1 for AVX2 at most, 0 for none."""


class HostFunction(Protocol):
    """Computes on the threads of torch; the record holds addresses of contiguous tensors."""

    def __call__(self, record: ctypes.Structure, dtype: torch.dtype, level: int) -> None: ...


@cache
def host_function(name: str) -> HostFunction | None:
    """Return ``colossal_NAME`` of ``csrc/cpu/NAME.cpp``; None where it cannot be built."""
    try:
        function = getattr(library(f"cpu/{name}"), f"colossal_{name}")
    except UnsupportedError:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    function.restype = None

    def call(record: ctypes.Structure, dtype: torch.dtype, level: int) -> None:
        function(ctypes.byref(record), CODES[dtype], torch.get_num_threads(), level)

    return call
