# pyright: reportUnknownMemberType=false
"""Coordinate the processes of a job: ranks, master ranks, barriers and turns."""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, final

import torch
from torch import distributed as dist

from colossal._src.cluster.backends import host_group
from colossal._src.cluster.config import set_current_config
from colossal._src.cluster.mesh import ParallelMesh, current_mesh, set_ambient_mesh
from colossal.errors import LaunchError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@final
class DistCoordinator:
    """Gives a process its rank and the world size, and lets processes take turns.

    A group argument restricts a query or a barrier to the ranks of that group; by default it covers all ranks.

    Args:
        mesh: The mesh that knows the local rank; the ambient one by default.

    Raises:
        MeshError: There is no process group yet.

    Example:
        >>> from colossal.cluster import DistCoordinator
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=3):
        ...     coordinator = DistCoordinator()
        ...     print(coordinator.rank, coordinator.is_master(), coordinator.is_last_process())
        3 False True
    """

    def __init__(self, mesh: ParallelMesh | None = None) -> None:
        mesh = mesh or current_mesh()
        self._rank, self._world_size, self._local_rank = mesh.global_rank, mesh.world_size, mesh.local_rank

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host."""
        return self._local_rank

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this process is the first of the group.

        Args:
            process_group: The group; all ranks by default.

        Returns:
            Whether its rank in the group is 0.
        """
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this process is the first of its host.

        Returns:
            Whether its local rank is 0.
        """
        return self._local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this process is the last of the group.

        Args:
            process_group: The group; all ranks by default.

        Returns:
            Whether its rank in the group is the highest.
        """
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, *values: object, process_group: dist.ProcessGroup | None = None, **options: Any) -> None:
        """Print on rank 0 of the group, as `print` does.

        Args:
            *values: Converted to text, with a space between; a group as the last one is `process_group`.
            process_group: The group; all ranks by default.
            **options: Those of `print`: ``sep``, ``end``, ``file`` and ``flush``.

        Example:
            >>> from colossal.cluster import DistCoordinator
            >>> from colossal.testing import fake_world
            >>> with fake_world(2):
            ...     DistCoordinator().print_on_master("loss", 0.5, sep=": ")
            loss: 0.5
        """
        last = values[-1] if values else None
        if process_group is None and isinstance(last, dist.ProcessGroup):
            values, process_group = values[:-1], last
        if self.is_master(process_group):
            print(*values, **options)  # noqa: T201 (printing is what was asked for)

    def print_on_node_master(self, *values: object, **options: Any) -> None:
        """Print on the first process of each host, as `print` does.

        Args:
            *values: Converted to text, with a space between.
            **options: Those of `print`: ``sep``, ``end``, ``file`` and ``flush``.
        """
        if self.is_node_master():
            print(*values, **options)  # noqa: T201 (printing is what was asked for)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Generator[None]:
        """Let one process of the group run the block first, such as a download, and then the others.

        Args:
            executor_rank: Rank in the group of the process that goes first.
            process_group: The group; all ranks by default.

        Raises:
            LaunchError: There is no such rank; or, on the others, the block failed on the process that went first.

        Communication: all-reduce, the group, 4 bytes.
        """
        size = dist.get_world_size(process_group)
        if not 0 <= executor_rank < size:
            raise LaunchError(
                f"The process that goes first is one of the group. Found executor_rank={executor_rank} in a group of "
                f"{size}. Pass a rank from 0 to {size - 1}."
            )
        if dist.get_rank(process_group) == executor_rank:
            failed = True
            try:
                yield
                failed = False
            finally:
                # Also after an error: the other ranks wait in this all-reduce, and learn by it that the block failed.
                self._count_failures(failed, process_group)
        else:
            if self._count_failures(False, process_group):
                raise LaunchError(
                    f"Rank {executor_rank} runs the block of priority_execution before the others. Found that it "
                    "failed there. Look at its own error."
                )
            yield

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result | None]]:
        """Make a decorator of functions that only rank 0 of the group runs.

        Args:
            process_group: The group; all ranks by default.

        Returns:
            The decorator. What it decorates returns None at once on all other ranks.
        """

        def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result | None]:
            @functools.wraps(function)
            def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return run

        return decorate

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until every process of the group is here.

        Args:
            process_group: The group; all ranks by default.

        Communication: barrier, the group, no payload.
        """
        # On the host, where a barrier need not guess the device.
        dist.barrier(host_group(process_group))

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Dissolve the group.

        Args:
            process_group: The group; by default all ranks, with all groups and the ambient mesh.
        """
        if process_group is None:
            set_ambient_mesh(None)
            set_current_config(None)
        dist.destroy_process_group(process_group)

    def _count_failures(self, failed: bool, process_group: dist.ProcessGroup | None) -> int:
        count = torch.tensor(int(failed), dtype=torch.int32, device="cpu")
        dist.all_reduce(count, group=host_group(process_group))
        return int(count.item())
