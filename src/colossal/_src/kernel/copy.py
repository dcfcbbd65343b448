"""Copies that go past the caches."""

import ctypes
from collections.abc import Callable
from functools import cache

from colossal._src._native import library
from colossal.errors import UnsupportedError


def stream_copy(target: int, source: int, num_bytes: int) -> None:
    """Copy host memory that is not read soon, such as the tensors of a snapshot.

    An ordinary copy reads the target into the cache before it writes to it; this one does not, and so moves two bytes
    for each one that is copied instead of three. Without a compiler it is an ordinary copy. Other threads run on
    meanwhile.

    Args:
        target: Address of the copy.
        source: Address of the original, which does not overlap with the copy.
        num_bytes: How much is copied.

    Example:
        >>> import torch
        >>> from colossal._src.kernel import stream_copy
        >>> source, target = torch.arange(4), torch.zeros(4, dtype=torch.long)
        >>> stream_copy(target.data_ptr(), source.data_ptr(), source.nbytes)
        >>> target
        tensor([0, 1, 2, 3])
    """
    _implementation()(target, source, num_bytes)


@cache
def _implementation() -> Callable[[int, int, int], object]:
    try:
        function = library("cpu/copy").colossal_stream_copy
    except UnsupportedError:
        return ctypes.memmove
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function
