"""The states of random generators: what an operation would draw is skipped now, and drawn later."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, final

import torch

_SCRATCH = 1 << 16
_BLOCK = 16  # the elements that torch draws together for a normal distribution, on a CPU
_aten = torch.ops.aten
GENERATOR_LOCK = RLock()
"""Held while a generator is temporarily set to another state: threads that simulate ranks use the same generator."""
_UNIFORM = {_aten.uniform_.default, _aten.rand.default, _aten.rand.generator, _aten.rand_like.default}
_NORMAL = {_aten.normal_.default, _aten.randn.default, _aten.randn.generator, _aten.randn_like.default}


def is_random(func: Any) -> bool:
    """Whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


@final
class RandomDraw:
    """What a random operation draws from: a generator, and the state that it had before."""

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self._generator = generator if generator is not None else _generator_of(device)
        self.state = self._generator.get_state()

    @contextmanager
    def again(self) -> Generator[None]:
        """Rewind the generator inside the context; afterwards its state is restored. Other threads wait."""
        with GENERATOR_LOCK:
            after = self._generator.get_state()
            self._generator.set_state(self.state)
            try:
                yield
            finally:
                self._generator.set_state(after)

    def skip(self, func: Any, result: torch.Tensor) -> bool:
        """Move the generator on as the operation would, without room for its result, where that is known how."""
        if not (result.is_contiguous() and result.is_floating_point()) or self._generator.device.type != "cpu":
            return False
        numel = result.numel()
        if func in _NORMAL and numel >= _BLOCK and _tail(result.dtype) is not None:
            begun = numel % _BLOCK
            numel += (_BLOCK if _tail(result.dtype) == "again" else _BLOCK - begun) if begun else 0
        elif func not in _UNIFORM:
            return False
        scratch = torch.empty(min(numel, _SCRATCH), dtype=result.dtype, device="cpu")
        for start in range(0, numel, _SCRATCH):
            scratch[: numel - start].uniform_(generator=self._generator)
        return True


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if device.index is None:  # pyright: ignore[reportUnnecessaryComparison]
        return module.default_generators[module.current_device()]
    return module.default_generators[device.index]


@cache
def _tail(dtype: torch.dtype) -> str | None:
    """Find out what a normal distribution draws for a block that is not full: versions of torch differ."""
    generator = torch.Generator()
    start = generator.get_state()
    torch.empty(_BLOCK + 1, dtype=dtype, device="cpu").normal_(generator=generator)
    state_after = generator.get_state()
    for tail, drawn in (("again", 2 * _BLOCK + 1), ("filled up", 2 * _BLOCK)):
        generator.set_state(start)
        torch.empty(drawn, dtype=dtype, device="cpu").uniform_(generator=generator)
        if torch.equal(state_after, generator.get_state()):
            return tail
    return None
