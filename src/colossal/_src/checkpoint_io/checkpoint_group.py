"""The ranks that save and load one checkpoint together, and how they agree on the outcome."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self, TypeVar, cast, final

import torch
import torch.distributed as dist

from colossal._src.cluster import host_group
from colossal._src.comm import CallOfAllRanks
from colossal.errors import CheckpointError, ColossalError, ConfigError

T = TypeVar("T")

_TOGETHER = "save and load a checkpoint, also those that write nothing,"


class CheckpointGroup(ABC):
    """What a `CheckpointIO` requires of the ranks that save and load one checkpoint together.

    Example:
        >>> from colossal.checkpoint_io import CheckpointGroup, ProcessGroupIO, SingleProcessIO
        >>> issubclass(SingleProcessIO, CheckpointGroup), issubclass(ProcessGroupIO, CheckpointGroup)
        (True, True)
    """

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group, in order."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that creates files and puts them in place."""
        return self.rank == self.ranks[0]

    @abstractmethod
    def gather(self, job: Callable[[], T]) -> list[T]:
        """Run a job on every rank; return once it has succeeded on all of them.

        Args:
            job: Reads or writes files, or changes this rank's own objects. It must not communicate.

        Returns:
            What `job` returned on each rank, in the order of the ranks.
        """

    @abstractmethod
    def gather_values(self, value: T) -> list[T]:
        """Bring what each rank has to the first one.

        Args:
            value: Anything that can be pickled.

        Returns:
            On the first rank the values in the order of the ranks; nothing on the others.
        """

    @abstractmethod
    def make_background_group(self) -> "CheckpointGroup":
        """Make writers that may be used by another thread while training communicates.

        Returns:
            New writers; all ranks must ask for them together.
        """

    def read(self, job: Callable[[], T]) -> T:
        """Run a job on every rank; return once it has succeeded on all of them.

        Args:
            job: Reads or writes files, or changes this rank's own objects. Only this rank learns its result.

        Returns:
            What `job` returned on this rank.

        Raises:
            CheckpointError: `job` failed on at least one rank; the first such rank's error, raised on all.

        Communication: that of `gather`.
        """
        # only the outcome is sent: what a rank has read stays here
        kept: list[T] = []
        self.gather(lambda: kept.append(job()))
        return kept[0]

    def write(self, job: Callable[[], None]) -> None:
        """Run a job on the first rank; return on every rank once it is done.

        Args:
            job: Creates files or puts them in place.

        Raises:
            CheckpointError: `job` failed.

        Communication: that of `gather`.
        """
        self.gather(job if self.is_first_rank else _nothing)


@final
class SingleProcessIO(CheckpointGroup):
    """The calling process reads and writes on its own; nothing is communicated.

    Example:
        >>> from colossal.checkpoint_io import SingleProcessIO
        >>> SingleProcessIO().read(lambda: 3)
        3
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """This process."""
        return (self.rank,)

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 without a process group."""
        return dist.get_rank() if dist.is_initialized() else 0

    def gather(self, job: Callable[[], T]) -> list[T]:
        """Run a job.

        Args:
            job: Anything.

        Returns:
            What `job` returned, in a list.
        """
        return [job()]

    def gather_values(self, value: T) -> list[T]:
        """Return the value.

        Args:
            value: Anything.

        Returns:
            The value, in a list.
        """
        return [value]

    def make_background_group(self) -> Self:
        """Return itself: nothing is communicated.

        Returns:
            This object.
        """
        return self


@final
class ProcessGroupIO(CheckpointGroup):
    """Saves and loads one checkpoint with all ranks of a group: each writes its shards, the first publishes it.

    An error on one rank is an error on every rank, with the same text, and no rank returns before all are done. The
    files must be visible to all ranks. A rank that waits longer than the timeout of the group fails.

    Communication: all_gather_object, the group, a few bytes, for each `gather`, `write` and `read`.

    Args:
        process_group: The ranks that save and load together; the default group if None.

    Raises:
        ConfigError: The default group is asked for and there is none.

    Example:
        >>> import torch.distributed as dist
        >>> from colossal.checkpoint_io import ProcessGroupIO
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ProcessGroupIO().read(lambda: 3)
        3
        >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is None and not dist.is_initialized():
            raise ConfigError(
                "Ranks that save and load a checkpoint together need a process group. Found no default process group. "
                "Call colossal.launch_from_torch() first, or use GeneralCheckpointIO() in a process on its own."
            )
        self._group = process_group

    @cached_property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        """Global ranks of the group."""
        return tuple(dist.get_process_group_ranks(self._group or dist.group.WORLD))

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return dist.get_rank()

    @property
    def _on_host(self) -> dist.ProcessGroup:
        """The group for what is agreed on, which begins and ends in host memory."""
        return host_group(self._group)

    def make_background_group(self) -> CheckpointGroup:
        """Form a group of the same ranks for another thread, over gloo, whatever training communicates by.

        Returns:
            CheckpointGroup of the new group.

        Communication: a new group is formed.
        """
        # local synchronization: without it, ranks outside of this group would have to call this as well
        group = dist.new_group(list(self.ranks), backend="gloo", use_local_synchronization=True)
        return _BackgroundGroup(cast("dist.ProcessGroup", group), self.ranks, self.rank)

    def gather(self, job: Callable[[], T]) -> list[T]:
        """Run a job on every rank; return once it has succeeded on all of them.

        Args:
            job: Reads or writes files, or changes this rank's own objects. It must not communicate.

        Returns:
            What `job` returned on each rank, in the order of the ranks.

        Raises:
            CheckpointError: `job` failed on at least one rank; the first such rank's error, raised on all.
        """
        return _gather(job, self.rank, self._exchange)

    def _exchange(self, outcome: Any) -> list[Any]:
        outcomes: list[Any] = [None] * len(self.ranks)
        with CallOfAllRanks(_TOGETHER):
            dist.all_gather_object(outcomes, outcome, group=self._on_host)
        return outcomes

    def gather_values(self, value: T) -> list[T]:
        """Bring what each rank has to the first one.

        Args:
            value: Anything that can be pickled.

        Returns:
            On the first rank the values in the order of the ranks; nothing on the others.

        Communication: gather_object, the group, the bytes of the values.
        """
        found: list[Any] | None = [None] * len(self.ranks) if self.is_first_rank else None
        with CallOfAllRanks(_TOGETHER):
            dist.gather_object(value, found, dst=self.ranks[0], group=self._on_host)
        return found or []


# [Note: saves after destroy_process_group] A program often ends by `torch.distributed.destroy_process_group()`, while
# its last asynchronous save is still being written. After that torch.distributed refuses to use any group. But the
# connections of a group last as long as a reference to it exists, so the background thread calls its methods directly.


@final
class _BackgroundGroup(CheckpointGroup):
    """The same ranks for another thread, over a separate gloo group that outlives the default process group."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self._group, self._ranks, self._rank = group, tuple(ranks), rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group."""
        return self._ranks

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._rank

    def make_background_group(self) -> Self:
        """Return itself: it belongs to one thread already."""
        return self

    def gather(self, job: Callable[[], T]) -> list[T]:
        """Run a job on every rank; return once it has succeeded on all of them."""
        return _gather(job, self.rank, self._exchange)

    def gather_values(self, value: T) -> list[T]:
        """Bring what each rank has to the first one."""
        values = self._exchange(value)
        return values if self.is_first_rank else []

    def _exchange(self, value: Any) -> list[Any]:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([len(content)], device="cpu"))
        # gloo gathers tensors of one size
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device="cpu")
        padded[: len(content)] = content
        contents = zip(self._all_gather(padded), sizes, strict=True)
        return [pickle.loads(each[: int(size)].numpy().tobytes()) for each, size in contents]  # noqa: S301 - of our ranks

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in self._ranks]
        self._group.allgather([found], [tensor]).wait()
        return found


def _gather(job: Callable[[], T], rank: int, exchange: Callable[[Any], list[Any]]) -> list[T]:
    """Run a job, let all ranks know what came of it, and raise the first error on all of them."""
    result, error = None, None
    try:
        result = job()
    except Exception as caught:  # noqa: BLE001 - the other ranks wait for the outcome, whatever it is
        error = caught
    outcomes = exchange((None if error is None else (*_describe(error), rank), result))
    for failure, _ in outcomes:
        if failure is not None:
            kind, text, place = failure
            where = "" if "(This happened on rank" in text else f" (This happened on rank {place}.)"
            raise kind(f"{text}{where}") from error
    return [each for _, each in outcomes]


def _nothing() -> None:
    """Stand in for the job on the ranks that do not write."""


def _describe(error: Exception) -> tuple[type[ColossalError], str]:
    """Return the class and the text with which every rank raises `error`."""
    if isinstance(error, ColossalError):
        return type(error), str(error)
    return CheckpointError, f"Reading or writing a checkpoint failed with {type(error).__name__}: {error}"
