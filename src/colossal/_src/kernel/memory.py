"""Tensors in host memory that is advised for huge pages."""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache

import torch

from colossal._src._native import library
from colossal.errors import UnsupportedError

_ALIGN = 64
_HUGE_PAGE = 1 << 21


def huge_zeros(shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return tensors of zeros, one after the other in host memory that is advised for huge pages.

    A pass over gigabytes, such as a step of an optimizer, loses a fifth of its speed to translating the addresses of
    4 KiB pages; pages of 2 MiB are 512 times fewer. The tensors of one call are packed into the same pages, so allocate
    all at once: a call for each small parameter would waste most of a page. A page takes no memory until it is first
    written to, and is allocated near the core that does so. Each tensor has a storage of its own size, so a file of one
    holds only that one; the memory is freed together with the last of them.

    Args:
        shapes: The shape of each tensor.
        dtype: The type of all of them.

    Returns:
        Contiguous tensors on the CPU, each aligned to 64 bytes.

    Example:
        >>> from colossal.kernel import huge_zeros
        >>> weight, bias = huge_zeros([(2, 3), (3,)])
        >>> weight
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
        >>> bias.data_ptr() - weight.data_ptr()
        64
    """
    wanted, end = [tuple(shape) for shape in shapes], 0
    offsets: list[int] = []
    for shape in wanted:
        offsets.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
    if not end:
        return [torch.zeros(shape, dtype=dtype, device="cpu") for shape in wanted]
    # with room to begin at the start of a huge page
    pages = mmap.mmap(-1, end + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: small ones then
            pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    return [_tensor_at(pages, start + offset, shape, dtype) for shape, offset in zip(wanted, offsets, strict=True)]


def _tensor_at(pages: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numel = math.prod(shape)
    if not numel:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(pages, dtype=dtype, count=numel, offset=offset).view(shape)


def stream_copy(target: int, source: int, num_bytes: int) -> None:
    """Copy host memory that is not read soon, such as the tensors of a snapshot.

    An ordinary copy reads the target into the cache before it writes to it; this one does not, and so moves two bytes
    for each one that is copied instead of three. Without a compiler it is an ordinary copy. Other threads run on
    meanwhile.
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
