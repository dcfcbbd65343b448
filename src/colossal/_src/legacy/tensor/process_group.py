"""The ranks of a distributed tensor: tensor-parallel peers on the inside, data-parallel replicas outside."""

from collections.abc import Sequence
from typing import Any, Self, final
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis, ParallelMesh, host_group
from colossal._src.legacy.mesh import RankGrid
from colossal._src.legacy.notice import superseded
from colossal.errors import MeshError

_MESHES: WeakKeyDictionary[Any, dict[tuple[Any, ...], ParallelMesh]] = WeakKeyDictionary()
"""The meshes of each job, by their ranks and sizes: forming one opens connections."""


@final
class ProcessGroup:
    """Arranges ranks as data-parallel replicas of tensor-parallel groups; adjacent ranks share a tensor.

    Superseded by `colossal.cluster.ParallelMesh`, which it builds, see `mesh`.

    Args:
        rank: The global rank of this process, which is the default.
        ranks: The global ranks that take part; all of them by default.
        tp_degree: Ranks over which a tensor is sharded; by default what `dp_degree` leaves, or 1.
        dp_degree: Replicas; by default what `tp_degree` leaves.

    Attributes:
        mesh: The mesh with the same axes, ``dp`` and ``tp``. Enter it (``with group.mesh:``) where a `Booster` shall
            use these axes.

    Raises:
        MeshError: There is no process group yet, the degrees do not multiply to the number of ranks, this process is
            none of `ranks`, or `rank` is that of another process.

    Example:
        >>> from colossal.legacy.tensor import ProcessGroup
        >>> from colossal.testing import fake_world
        >>> with fake_world(8, rank=5):
        ...     group = ProcessGroup(tp_degree=4, dp_degree=2)
        ...     print(group.tp_rank_list(), group.dp_rank_list(), group.tp_local_rank())
        [4, 5, 6, 7] [1, 5] 1

    Communication: all ranks of the group open connections when it is first made.
    """

    mesh: ParallelMesh

    def __init__(
        self,
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
        tp_degree: int | None = None,
        dp_degree: int | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise MeshError(
                "A ProcessGroup arranges processes that have found each other. Found no process group. Call "
                "colossal.launch_from_torch(config={}) first."
            )
        superseded("colossal.tensor.ProcessGroup", "ParallelMesh(dp=..., tp=...)")
        self._rank = dist.get_rank()
        self._ranks = list(range(dist.get_world_size())) if ranks is None else sorted(ranks)
        if (rank is not None and rank != self._rank) or self._rank not in self._ranks:
            raise MeshError(
                f"A process makes the group that it is in itself. Found rank={rank} and ranks={self._ranks} on rank "
                f"{self._rank}. Leave rank out, and call only on the ranks of the group."
            )
        self._tp, self._dp = _degrees(len(self._ranks), tp_degree, dp_degree)
        self.mesh = _mesh_of(self._ranks, self._dp, self._tp)

    def __eq__(self, other: object) -> bool:
        """Whether it arranges the same ranks in the same way."""
        return isinstance(other, ProcessGroup) and (self._ranks, self._tp) == (other._ranks, other._tp)

    def __hash__(self) -> int:
        return hash((tuple(self._ranks), self._tp))

    def __repr__(self) -> str:
        return f"ProcessGroup(ranks={self._ranks}, tp_degree={self._tp}, dp_degree={self._dp})"

    def __deepcopy__(self, _memo: object) -> Self:
        """The processes are not copied with a tensor that knows them."""
        return self

    def rank(self) -> int:
        """Return the global rank of this process.

        Returns:
            The rank.
        """
        return self._rank

    def ranks_in_group(self) -> list[int]:
        """Return the global ranks that take part.

        Returns:
            The ranks, in order.
        """
        return list(self._ranks)

    def world_size(self) -> int:
        """Return how many ranks take part.

        Returns:
            Their number.
        """
        return len(self._ranks)

    def tp_world_size(self) -> int:
        """Return over how many ranks a tensor is sharded.

        Returns:
            Their number.
        """
        return self._tp

    def dp_world_size(self) -> int:
        """Return how many replicas there are.

        Returns:
            Their number.
        """
        return self._dp

    def tp_local_rank(self) -> int:
        """Return the index of this process among the ranks that share a tensor.

        Returns:
            The index, from 0.
        """
        return self.mesh.rank("tp")

    def dp_local_rank(self) -> int:
        """Return the index of this process among the replicas.

        Returns:
            The index, from 0.
        """
        return self.mesh.rank("dp")

    def tp_rank_list(self) -> list[int]:
        """Return the global ranks that share a tensor with this one.

        Returns:
            The ranks, in order.
        """
        return list(self.mesh.ranks("tp"))

    def dp_rank_list(self) -> list[int]:
        """Return the global ranks that hold replicas of what this one holds.

        Returns:
            The ranks, in order.
        """
        return list(self.mesh.ranks("dp"))

    def get_ranks_in_tp(self) -> list[int]:
        """Return what `tp_rank_list` does.

        Returns:
            The ranks, in order.
        """
        return self.tp_rank_list()

    def get_ranks_in_dp(self) -> list[int]:
        """Return what `dp_rank_list` does.

        Returns:
            The ranks, in order.
        """
        return self.dp_rank_list()

    def tp_process_group(self) -> dist.ProcessGroup:
        """Return torch's group of the ranks that share a tensor.

        Returns:
            The group.
        """
        return self._group("tp")

    def dp_process_group(self) -> dist.ProcessGroup:
        """Return torch's group of the replicas.

        Returns:
            The group.
        """
        return self._group("dp")

    def cpu_tp_process_group(self) -> dist.ProcessGroup:
        """Return a group of the same ranks as `tp_process_group`, for tensors in host memory.

        Returns:
            The group.
        """
        return host_group(self._group("tp"))

    def cpu_dp_process_group(self) -> dist.ProcessGroup:
        """Return a group of the same ranks as `dp_process_group`, for tensors in host memory.

        Returns:
            The group.
        """
        return host_group(self._group("dp"))

    @property
    def has_cpu_groups(self) -> bool:
        """Whether there are groups for tensors in host memory, which are formed when first asked for."""
        return True

    def set_cpu_groups(self) -> None:
        """Form the groups for tensors in host memory now; all ranks must call.

        Communication: connections are opened.
        """
        self.cpu_tp_process_group()
        self.cpu_dp_process_group()

    def _group(self, axis: Axis) -> dist.ProcessGroup:
        return self.mesh.group(axis)


def _degrees(size: int, tp: int | None, dp: int | None) -> tuple[int, int]:
    tp_size = (1 if dp is None else size // max(dp, 1)) if tp is None else tp
    dp_size = size // max(tp_size, 1) if dp is None else dp
    if min(tp_size, dp_size) < 1 or tp_size * dp_size != size:
        raise MeshError(
            f"The product of the degrees must be the number of ranks. Found tp_degree={tp} and dp_degree={dp} for "
            f"{size} ranks. Pass degrees whose product is {size}, or leave one out."
        )
    return tp_size, dp_size


def _mesh_of(ranks: list[int], dp: int, tp: int) -> ParallelMesh:
    """Return the mesh of a group, one for all groups that are equal."""
    known = _MESHES.setdefault(dist.group.WORLD, {})
    key = (*ranks, tp)
    if key not in known:
        is_all = ranks == list(range(dist.get_world_size()))
        grid = torch.tensor(ranks, device="cpu").view(dp, tp)
        known[key] = ParallelMesh(dp=dp, tp=tp) if is_all else RankGrid(grid).as_mesh()
    return known[key]
