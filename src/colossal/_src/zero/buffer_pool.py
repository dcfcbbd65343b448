"""Buffers that are reused, so that memory is allocated once."""

from typing import Protocol, final

import torch

from colossal._src.kernel import huge_zeros

_MOST_KEPT = 2
# bytes; shorter buffers do not fill a huge page (docs/decisions/0009)
_HUGE_PAGE = 1 << 21


class Pool(Protocol):
    """What lends buffers."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lend a buffer."""
        ...

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        ...


@final
class BufferPool:
    """Buffers of gradients that are on their way: few at a time, while all parameters pass through them."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._largest = 0

    def expect(self, numel: int) -> None:
        """Make new buffers so large that each fits whatever is going to be asked for."""
        self._largest = max(self._largest, numel)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lend a buffer."""
        fitting = [
            free for free in self._free if (free.dtype, free.device) == (dtype, device) and free.numel() >= numel
        ]
        if not fitting:
            return zeros(max(numel, self._largest), dtype, device)[:numel]
        smallest = min(fitting, key=torch.Tensor.numel)
        self._free = [free for free in self._free if free is not smallest]
        return smallest[:numel]

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        # `take` lends the beginning of a buffer: without its base the rest would never be reused
        base = buffer if buffer._base is None else buffer._base  # noqa: SLF001 (it has no public name)
        # the longest ones, as these fit most of what is asked for
        self._free = sorted([*self._free, base], key=torch.Tensor.numel)[-_MOST_KEPT:]


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a buffer: in huge pages, where it is in host memory and fills one."""
    if device.type == "cpu" and numel * dtype.itemsize >= _HUGE_PAGE:
        return huge_zeros([(numel,)], dtype)[0]
    return torch.zeros(numel, dtype=dtype, device=device)
