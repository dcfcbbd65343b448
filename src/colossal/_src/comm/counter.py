"""How often the ranks talk, and how much they say."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import Token
from types import TracebackType
from typing import Literal, Self, final

from colossal._src.cluster import Axis, InheritedContextVar

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send"]

_ACTIVE: InheritedContextVar[tuple["CommCounter", ...]] = InheritedContextVar("colossal_comm_counters", ())


@final
class CommCounter:
    """Counts the collectives of this rank, by operation and axis, while it is open.

    Bytes are what this rank sends under the bandwidth-optimal algorithm (a ring): for a group of n ranks and a full
    tensor of N bytes, 2 N (n - 1) / n for an all-reduce and N (n - 1) / n for the others; a message from one rank to
    another, ``send``, counts as it is. An axis of one rank sends
    nothing and is not counted. A backward pass is counted where its forward pass was.

    Attributes:
        calls: Number of calls, by operation and axis.
        bytes: Number of bytes that this rank sent, by operation and axis.

    Source: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005,
    https://doi.org/10.1177/1094342005051521.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(4), ParallelMesh(tp=4), comm.CommCounter() as counter:
        ...     _ = comm.reduce(torch.zeros(1000), "tp")
        >>> counter.calls["all_reduce", "tp"], counter.bytes["all_reduce", "tp"]
        (1, 6000)
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[Op, Axis]] = Counter()
        self.bytes: Counter[tuple[Op, Axis]] = Counter()
        # A stack, as a counter may be opened again while it is open.
        self._tokens: list[tuple[Token[tuple[CommCounter, ...]], tuple[CommCounter, ...]]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_ACTIVE.set((*_ACTIVE.get(), self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.reset(self._tokens.pop())

    def __str__(self) -> str:
        rows = [f"{'operation':<16}{'axis':<8}{'calls':>8}{'bytes sent':>16}"]
        for (op, axis), calls in sorted(self.calls.items()):
            rows.append(f"{op:<16}{axis:<8}{calls:>8}{self.bytes[op, axis]:>16,}")
        return "\n".join(rows)

    def add(self, op: Op, axis: Axis, num_bytes: int) -> None:
        """Count one call.

        Args:
            op: The operation.
            axis: The axis of the mesh that it runs along.
            num_bytes: Bytes that this rank sends.
        """
        self.calls[op, axis] += 1
        self.bytes[op, axis] += num_bytes


def count_collective(op: Op, axis: Axis, num_bytes: int) -> None:
    """Count one call that `colossal.comm` does not make itself, such as a message between two stages."""
    for counter in _ACTIVE.get():
        counter.add(op, axis, num_bytes)


@contextmanager
def uncounted() -> Generator[None]:
    """Leave out what happens inside, such as a check, which is no part of training."""
    token = _ACTIVE.set(())
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_counters() -> tuple[CommCounter, ...]:
    """Find the counters that are open in this thread."""
    return _ACTIVE.get()
