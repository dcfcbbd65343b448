"""A random generator of its own for a part of a program."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import distributed as dist

from colossal._src.legacy.notice import superseded
from colossal.accelerator import get_accelerator

_RANK_STEP = 1 << 20  # between the seeds of ranks; more than the generators of a model


class Randomizer:
    """A generator that is not disturbed by what the rest of the program draws, and does not disturb it.

    Superseded by the modes of `colossal.legacy.context.random`; layers of `colossal.nn` draw what they need by
    themselves.

    Args:
        seed: Of the generator.

    Example:
        >>> import torch
        >>> from colossal.shardformer.layer.utils import Randomizer
        >>> first, second = Randomizer(3), Randomizer(3)
        >>> with first.fork_rng():
        ...     drawn = torch.rand(2)
        >>> with second.fork_rng():
        ...     print(torch.equal(torch.rand(2), drawn))
        True
    """

    _index: ClassVar[int] = 0

    def __init__(self, seed: int) -> None:
        superseded("colossal.shardformer.layer.utils.Randomizer", "colossal.legacy.context.random.seed(mode)")
        outer = _read_state()
        torch.manual_seed(seed)
        self._state = _read_state()
        _write_state(outer)

    @contextmanager
    def fork_rng(self, enable_cpu: bool = True) -> Iterator[None]:
        """Draw from this generator in a block.

        Args:
            enable_cpu: As in older programs; the generator of the host is forked with that of the device.

        Yields:
            Nothing.
        """
        del enable_cpu
        outer = _read_state()
        _write_state(self._state)
        try:
            yield
        finally:
            self._state = _read_state()
            _write_state(outer)

    @classmethod
    def index(cls) -> int:
        """Return how many generators `create_randomizer_with_offset` has made since the last `reset_index`.

        Returns:
            Their number.
        """
        return Randomizer._index

    @classmethod
    def increment_index(cls) -> None:
        """Count one more."""
        Randomizer._index += 1

    @classmethod
    def reset_index(cls) -> None:
        """Count from zero, so that the generators of the next model have the seeds of those of the last one."""
        Randomizer._index = 0


def create_randomizer_with_offset(
    seed: int,
    process_group: dist.ProcessGroup | None = None,
    offset_by_rank: bool = True,
    offset_by_index: bool = True,
) -> Randomizer:
    """Make a generator that differs from those of other ranks, and from those made before.

    Args:
        seed: The seed of the first, on rank 0.
        process_group: The ranks that are counted; all by default.
        offset_by_rank: Whether ranks draw differently.
        offset_by_index: Whether it differs from those made before.

    Returns:
        The generator.

    Example:
        >>> import torch
        >>> from colossal.shardformer.layer.utils import create_randomizer_with_offset
        >>> from colossal.testing import run_threads
        >>> run_threads(lambda: create_randomizer_with_offset(3) is not None, 2)
        [True, True]
    """
    own = seed + (Randomizer.index() if offset_by_index else 0)
    if offset_by_rank and dist.is_initialized():
        own += dist.get_rank(process_group) * _RANK_STEP
    Randomizer.increment_index()
    return Randomizer(own)


def _read_state() -> tuple[torch.Tensor, ...]:
    """The states of the generators of the host and of the device."""
    device = get_accelerator().get_rng_state()
    return (torch.get_rng_state(),) if device is None else (torch.get_rng_state(), device)


def _write_state(state: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        get_accelerator().set_rng_state(state[1])
