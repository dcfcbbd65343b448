# pyright: reportUnknownMemberType=false
"""Process groups along the axes of a grid of all ranks, which have numbers instead of names."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal, cast, final

from torch import distributed as dist

from colossal._src.legacy.mesh.rank_grid import form_group
from colossal._src.legacy.notice import superseded
from colossal.errors import MeshError

Coordinate = tuple[int, ...]
_Axes = int | Sequence[int]


@final
class ProcessGroupMesh:
    """Arranges all ranks on a grid; the last axis counts first.

    Superseded by `colossal.cluster.ParallelMesh`.

    Args:
        *size: The number of ranks along each axis.

    Raises:
        MeshError: There is no process group yet, or the sizes do not multiply to the number of ranks.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=1):
        ...     mesh = ProcessGroupMesh(1, 2, 2)
        ...     mesh.coordinate(), mesh.get_ranks_in_group(mesh.get_group_along_axis(1))
        ((0, 0, 1), [1, 3])
    """

    def __init__(self, *size: int) -> None:
        if not dist.is_initialized():
            raise MeshError("A mesh arranges processes that have found each other. Found none. Call launch.")
        if not size or min(size) < 1 or math.prod(size) != dist.get_world_size():
            raise MeshError(
                f"The sizes of the axes multiply to the number of processes. Found {size} for "
                f"{dist.get_world_size()} processes. Change a size."
            )
        superseded("colossal.cluster.ProcessGroupMesh", "ParallelMesh(pp=..., dp=..., tp=...)")
        self._shape = tuple(size)
        self._rank = dist.get_rank()
        self._coordinate = self.unravel(self._rank, self._shape)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self._shape

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._rank

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Return the number of ranks along an axis, or along all.

        Args:
            dim: The axis; all by default.

        Returns:
            The number, or one for each axis.
        """
        return self._shape if dim is None else self._shape[dim]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """Return the index of this process along an axis, or along all.

        Args:
            dim: The axis; all by default.

        Returns:
            The index, or one for each axis.
        """
        return self._coordinate if dim is None else self._coordinate[dim]

    @staticmethod
    def unravel(rank: int, shape: Sequence[int]) -> Coordinate:
        """Return the indices of a rank.

        Args:
            rank: The rank.
            shape: The size of each axis.

        Returns:
            Its index along each axis.

        Raises:
            MeshError: There is no such rank.
        """
        if not 0 <= rank < math.prod(shape):
            raise MeshError(f"A mesh of {tuple(shape)} has ranks 0 to {math.prod(shape) - 1}. Found {rank}. Pass one.")
        found: list[int] = []
        for size in reversed(shape):
            rank, index = divmod(rank, size)
            found.append(index)
        return tuple(reversed(found))

    @staticmethod
    def ravel(coord: Sequence[int], shape: Sequence[int], mode: Literal["raise", "wrap", "clip"] = "raise") -> int:
        """Return the rank with some indices.

        Args:
            coord: The index along each axis.
            shape: The size of each axis.
            mode: What to do with an index outside of its axis: raise, count from the other end, or take the nearest.

        Returns:
            The rank.

        Raises:
            MeshError: An index is outside of its axis.
        """
        rank = 0
        for index, size in zip(coord, shape, strict=True):
            if mode == "raise" and not 0 <= index < size:
                raise MeshError(
                    f"An index is from 0 to the size of its axis. Found {tuple(coord)} in {tuple(shape)}. Pass "
                    "mode='wrap' to count from the other end."
                )
            rank = rank * size + (min(max(index, 0), size - 1) if mode == "clip" else index % size)
        return rank

    @staticmethod
    def get_coords_along_axis(
        base_coord: Sequence[int], axis: _Axes, indices_at_axis: Sequence[int] | Sequence[Sequence[int]]
    ) -> list[Coordinate]:
        """Return the places that differ from one along some axes only.

        Args:
            base_coord: A place.
            axis: The axis, or several.
            indices_at_axis: The indices along it; for several axes, a list for each.

        Returns:
            The places, the last axis first.
        """
        axes = [axis] if isinstance(axis, int) else list(axis)
        choices: list[Sequence[int]] = [indices_at_axis] if isinstance(axis, int) else list(indices_at_axis)  # type: ignore[list-item, arg-type]
        found: list[Coordinate] = []
        for indices in product(*choices):
            place = list(base_coord)
            for at, index in zip(axes, indices, strict=True):
                place[at] = index
            found.append(tuple(place))
        return found

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Return the global ranks of a group.

        Args:
            group: The group.

        Returns:
            The ranks, in order.
        """
        return dist.get_process_group_ranks(group)

    def create_group_along_axis(
        self,
        axis: _Axes,
        indices_at_axis: Sequence[int] | Sequence[Sequence[int]] | None = None,
        backend: str | None = None,
    ) -> dist.ProcessGroup:
        """Form the groups along an axis, or along several.

        Args:
            axis: The axis, or several.
            indices_at_axis: The indices that take part; all by default. For several axes, a list for each.
            backend: The backend of the groups; that of all ranks by default, and where NCCL is not available.

        Returns:
            The group of this rank; on a rank that is not among the indices ``GroupMember.NON_GROUP_MEMBER``, as of
            `torch.distributed.new_group`.

        Communication: the ranks of each group open connections; all of them must call.
        """
        if indices_at_axis is None:
            axes = [axis] if isinstance(axis, int) else list(axis)
            every = [range(self._shape[at]) for at in axes]
            indices_at_axis = every[0] if isinstance(axis, int) else every
        places = self.get_coords_along_axis(self._coordinate, axis, indices_at_axis)
        ranks = tuple(self.ravel(place, self._shape) for place in places)
        if self._rank not in ranks:
            return cast("dist.ProcessGroup", dist.GroupMember.NON_GROUP_MEMBER)
        if ranks not in self._groups:
            self._groups[ranks] = form_group(ranks, usable_backend(backend))
        return self._groups[ranks]

    def get_group_along_axis(
        self,
        axis: _Axes,
        indices_at_axis: Sequence[int] | Sequence[Sequence[int]] | None = None,
        backend: str | None = None,
    ) -> dist.ProcessGroup:
        """Return the group of this rank along an axis, which is formed at the first call.

        Args:
            axis: The axis, or several.
            indices_at_axis: The indices that take part; all by default.
            backend: As of `create_group_along_axis`.

        Returns:
            The group, as `create_group_along_axis` does.

        Communication: at the first call, that of `create_group_along_axis`.
        """
        return self.create_group_along_axis(axis, indices_at_axis, backend)

    def destroy_mesh_process_groups(self) -> None:
        """Close the connections of all its groups; all ranks must call."""
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups.clear()


@final
class ProcessGroupManager:
    """Keeps process groups by names.

    Superseded by `colossal.cluster.ParallelMesh`, whose groups have the names of its axes.

    Example:
        >>> from colossal.legacy.cluster import ProcessGroupManager
        >>> from colossal.testing import fake_world
        >>> with fake_world(4, rank=1):
        ...     ProcessGroupManager().create_process_group("pair", [0, 1]).size()
        2

    Attributes:
        pg_store: The groups by name.
    """

    def __init__(self) -> None:
        self.pg_store: dict[str, dist.ProcessGroup] = {}

    def create_process_group(self, name: str, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Form a group, on its ranks.

        Args:
            name: Its name.
            ranks: Its global ranks.
            backend: Its backend; by default, and for NCCL on other devices, that of all ranks.

        Returns:
            The group.

        Raises:
            MeshError: The name is taken, or this rank is none of the group.

        Communication: the ranks of the group open connections; all of them must call.
        """
        if name in self.pg_store or dist.get_rank() not in ranks:
            raise MeshError(
                f"A group has a name of its own, and is formed by its ranks. Found {name!r} of {list(ranks)} on rank "
                f"{dist.get_rank()}, with the names {list(self.pg_store)}. Change the name, or call on these ranks."
            )
        self.pg_store[name] = form_group(list(ranks), usable_backend(backend))
        return self.pg_store[name]

    def get(self, name: str) -> dist.ProcessGroup:
        """Return the group with a name.

        Args:
            name: Its name.

        Returns:
            The group.

        Raises:
            MeshError: There is none.
        """
        if name not in self.pg_store:
            raise MeshError(f"The groups are {list(self.pg_store)}. Found {name!r}. Create it first.")
        return self.pg_store[name]

    def destroy(self, name: str) -> None:
        """Close the connections of a group.

        Args:
            name: Its name.

        Raises:
            MeshError: There is none.
        """
        group = self.get(name)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
        del self.pg_store[name]

    def destroy_all(self) -> None:
        """Close the connections of all groups."""
        for name in list(self.pg_store):
            self.destroy(name)


def usable_backend(backend: str | None) -> str | None:
    """Return a backend, None for NCCL, which programs name by habit, on ranks that do not use it."""
    return None if backend == dist.Backend.NCCL and dist.Backend.NCCL not in str(dist.get_backend()) else backend
