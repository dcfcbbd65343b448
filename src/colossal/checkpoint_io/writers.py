"""Who writes a checkpoint, and how the ranks agree on what came of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import torch.distributed as dist

from colossal.errors import CheckpointError, ColossalError, ConfigError

T = TypeVar("T")


class Writers(ABC):
    """What a `CheckpointIO` asks of the ranks that share a checkpoint.

    Example:
        >>> from colossal.checkpoint_io import Alone, OneForAll, Writers
        >>> issubclass(Alone, Writers), issubclass(OneForAll, Writers)
        (True, True)
    """

    @abstractmethod
    def write(self, job: Callable[[], None]) -> None:
        """Run a job where it must run; return on every rank once it is done.

        Args:
            job: Writes the files.
        """

    @abstractmethod
    def read(self, job: Callable[[], T]) -> T:
        """Run a job on every rank; return once it has succeeded on all of them.

        Args:
            job: Reads files, or changes this rank's own objects.

        Returns:
            What `job` returned on this rank.
        """


@final
class Alone(Writers):
    """The calling process reads and writes on its own; nothing is communicated.

    Example:
        >>> from colossal.checkpoint_io import Alone
        >>> Alone().read(lambda: 3)
        3
    """

    def write(self, job: Callable[[], None]) -> None:
        """Run a job.

        Args:
            job: Writes the files.
        """
        job()

    def read(self, job: Callable[[], T]) -> T:
        """Run a job.

        Args:
            job: Reads files, or changes objects.

        Returns:
            What `job` returned.
        """
        return job()


@final
class OneForAll(Writers):
    """Rank 0 of a group writes for all of it; every rank reads.

    An error on one rank is an error on every rank, with the same text, and no rank returns before all are done. A rank
    that waits longer than the timeout of the group fails.

    Communication: all_gather_object, the group, a few bytes, for each `write` and each `read`.

    Args:
        process_group: The ranks that hold the same state; the default group if None.

    Raises:
        ConfigError: The default group is asked for and there is none.

    Example:
        >>> import torch.distributed as dist
        >>> from colossal.checkpoint_io import OneForAll
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> OneForAll().read(lambda: 3)
        3
        >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is None and not dist.is_initialized():
            raise ConfigError(
                "Ranks that share a checkpoint need a process group. Found no default process group. Call "
                "colossal.launch_from_torch() first, or use GeneralCheckpointIO() in a process on its own."
            )
        self._group = process_group

    def write(self, job: Callable[[], None]) -> None:
        """Run a job on rank 0 of the group; return on every rank once it is done.

        Args:
            job: Writes the files.

        Raises:
            CheckpointError: `job` failed.
        """
        is_writer = dist.get_rank(self._group) == 0
        self.read(job if is_writer else _nothing)

    def read(self, job: Callable[[], T]) -> T:
        """Run a job on every rank; return once it has succeeded on all of them.

        Args:
            job: Reads files, or changes this rank's own objects. It must not communicate.

        Returns:
            What `job` returned on this rank.

        Raises:
            CheckpointError: `job` failed on at least one rank; the first such rank's error, raised on all.
        """
        result, error = None, None
        try:
            result = job()
        except Exception as caught:  # noqa: BLE001 - the other ranks wait for the outcome, whatever it is
            error = caught
        failure = self._first_failure(error)
        if failure is not None:
            raise failure from error
        return cast("T", result)

    def _first_failure(self, error: Exception | None) -> ColossalError | None:
        """Exchange the outcomes; return the first rank's failure, alike on every rank, or None."""
        outcome = None if error is None else (*_describe(error), dist.get_rank())
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(outcomes, outcome, group=self._group)
        for kind, text, rank in filter(None, outcomes):
            return kind(f"{text} (This happened on rank {rank}.)")
        return None


def _nothing() -> None:
    """Stand in for the job on the ranks that do not write."""


def _describe(error: Exception) -> tuple[type[ColossalError], str]:
    """Return the class and the text with which every rank raises `error`."""
    if isinstance(error, ColossalError):
        return type(error), str(error)
    return CheckpointError, f"Reading or writing a checkpoint failed with {type(error).__name__}: {error}"
