# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A grid of devices with what it costs to communicate along its axes."""

from collections.abc import Sequence
from typing import Any, Self, final

import torch
from torch import distributed as dist

from colossal._src.cluster import AxisCost, Link, LinkCost, LinkOp, collective_cost_factors
from colossal._src.comm import gather_objects
from colossal._src.legacy.mesh.rank_grid import RankGrid
from colossal._src.legacy.notice import superseded
from colossal.accelerator import get_accelerator
from colossal.errors import MeshError

_MIN_LINKED = 2


@final
class DeviceMesh:
    """Arranges some ranks, in any order, on a grid of up to four axes.

    Superseded by `colossal.cluster.ParallelMesh`, and for costs by `colossal.cluster.LinkCost`.

    Args:
        physical_mesh_id: The global ranks, a tensor of any shape.
        mesh_shape: The shape to which they are brought; their own by default.
        logical_mesh_id: The grid itself, instead of `mesh_shape`.
        mesh_alpha: For each axis, the seconds that a message takes however short it is; 1 by default.
        mesh_beta: For each axis, the seconds that each byte adds; 1 by default.
        init_process_group: Form the groups of all axes now; otherwise each is formed when it is first used.
        device: The type of device of the ranks; that of this process by default.
        need_flatten: Accepted: `flatten` gives the mesh of one axis when it is called.

    Attributes:
        grid: The ranks and their groups.

    Raises:
        MeshError: The shapes or costs do not fit each other, or a rank is there twice.

    Example:
        >>> import torch
        >>> from colossal.legacy.device import DeviceMesh
        >>> mesh = DeviceMesh(torch.arange(16), (4, 4))
        >>> mesh.global_rank_to_local_rank(11), mesh.get_ranks_in_process_group(axis=1, global_rank=2)
        ([2, 3], [0, 1, 2, 3])
    """

    def __init__(
        self,
        physical_mesh_id: torch.Tensor,
        mesh_shape: Sequence[int] | None = None,
        logical_mesh_id: torch.Tensor | None = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
        init_process_group: bool = False,
        device: str | None = None,
        *,
        need_flatten: bool = True,
    ) -> None:
        del need_flatten
        superseded("colossal.device.DeviceMesh", "ParallelMesh(...), with link_cost= for costs")
        physical = torch.as_tensor(physical_mesh_id, dtype=torch.int64, device="cpu")
        shape = tuple(physical.shape if mesh_shape is None else mesh_shape)
        logical = physical.reshape(-1) if logical_mesh_id is None else logical_mesh_id.to("cpu", torch.int64)
        if (logical_mesh_id is not None and mesh_shape is not None) or sorted(logical.flatten().tolist()) != sorted(
            physical.flatten().tolist()
        ):
            raise MeshError(
                "A logical mesh arranges the physical ranks, as mesh_shape or as logical_mesh_id says. Found "
                f"{physical.tolist()}, mesh_shape={mesh_shape} and logical_mesh_id={logical_mesh_id}. Pass one of both."
            )
        if logical_mesh_id is None and torch.Size(shape).numel() != logical.numel():
            raise MeshError(f"A mesh of {shape} has as many ranks. Found {logical.numel()} ranks. Change the shape.")
        self.logical_mesh_id = logical.reshape(shape) if logical_mesh_id is None else logical
        self.physical_mesh_id = physical
        self.device = device or get_accelerator().name
        axes = self.logical_mesh_id.dim()
        self.mesh_alpha = [1.0] * axes if mesh_alpha is None else list(mesh_alpha)
        self.mesh_beta = [1.0] * axes if mesh_beta is None else list(mesh_beta)
        if len(self.mesh_alpha) != axes or len(self.mesh_beta) != axes:
            raise MeshError(
                f"Costs are one alpha and one beta for each of {axes} axes. Found {mesh_alpha} and {mesh_beta}. Pass "
                "as many."
            )
        self.grid = RankGrid(self.logical_mesh_id)
        self.grid.link_cost = None if mesh_alpha is None or mesh_beta is None else self._link_cost()
        if init_process_group:
            for axis in range(axes):
                self.get_process_group(axis)

    def __deepcopy__(self, _memo: object) -> Self:
        """The processes are not copied with a tensor that knows them."""
        return self

    def __repr__(self) -> str:
        return f"DeviceMesh({self.logical_mesh_id.tolist()})"

    @classmethod
    def from_process_group(cls, process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup]) -> Self:
        """Make a mesh of process groups.

        Args:
            process_group: The group of each axis that this rank is in, the outermost first; or one for a single axis.

        Returns:
            The mesh, which uses these groups.

        Communication: all_gather of the ranks, each group but the last.
        """
        groups: list[Any] = [*process_group] if isinstance(process_group, list | tuple) else [process_group]
        ranks: Any = dist.get_process_group_ranks(groups[-1])
        for group in reversed(groups[:-1]):
            ranks = gather_objects(ranks, [group])
        made = cls(torch.tensor(ranks, device="cpu"))
        for axis, group in enumerate(groups):
            made.grid.set_group(made.grid.names[axis], group)
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return tuple(self.logical_mesh_id.shape)

    @property
    def num_devices(self) -> int:
        """The number of ranks."""
        return self.logical_mesh_id.numel()

    @property
    def is_initialized(self) -> bool:
        """Whether process groups can be used, which is so after `launch`."""
        return dist.is_initialized()

    def get_process_group(self, axis: int, global_rank: int | None = None) -> dist.ProcessGroup:
        """Return the process group along an axis.

        Args:
            axis: The axis.
            global_rank: A rank of the group; this one by default.

        Returns:
            The group.

        Raises:
            MeshError: This rank is not in that group.

        Communication: at the first call the ranks of the group open connections; all of them must call.
        """
        if global_rank is not None and dist.get_rank() not in self.get_ranks_in_process_group(axis, global_rank):
            raise MeshError(
                f"A rank has the groups that it is in. Found rank {dist.get_rank()} asking for that of rank "
                f"{global_rank} along axis {axis}. Ask for this rank's."
            )
        return self.grid.group(self._name(axis))

    def get_process_group_for_all_axes(self, global_rank: int | None = None) -> dict[int, dist.ProcessGroup]:
        """Return the process groups of this rank by the number of their axis.

        Args:
            global_rank: A rank, which must be this one; this one by default.

        Returns:
            The groups by axis.
        """
        return {axis: self.get_process_group(axis, global_rank) for axis in range(len(self.shape))}

    @property
    def process_groups_dict(self) -> dict[int, dist.ProcessGroup]:
        """The process groups of this rank by the number of their axis."""
        return self.get_process_group_for_all_axes()

    def get_ranks_in_process_group(self, axis: int, global_rank: int | None = None) -> list[int]:
        """Return the global ranks of the group along an axis.

        Args:
            axis: The axis.
            global_rank: A rank of the group; this one by default.

        Returns:
            The ranks, in order.

        Raises:
            MeshError: The rank is not on the mesh, or there is no such axis.
        """
        rank = dist.get_rank() if global_rank is None else global_rank
        return list(self.grid.ranks_from(rank, [self._name(axis)]))

    def global_rank_to_local_rank(self, rank: int, axis: int | None = None) -> Any:
        """Return the place of a rank.

        Args:
            rank: A global rank.
            axis: One axis; all by default.

        Returns:
            Its index along the axis, or a list of those along all.

        Raises:
            MeshError: The rank is not on the mesh.
        """
        place = list(self.grid.place_of(rank))
        return place if axis is None else place[axis]

    def flatten(self) -> "DeviceMesh":
        """Return a mesh of the same ranks with one axis, as slow as the slowest of this one's.

        Returns:
            The mesh.
        """
        return DeviceMesh(
            self.logical_mesh_id.flatten(), mesh_alpha=[max(self.mesh_alpha)], mesh_beta=[max(self.mesh_beta)]
        )

    def all_gather_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Predict the seconds of an all-gather of a full tensor of so many bytes along an axis.

        Args:
            num_bytes: The bytes.
            mesh_dim: The axis.

        Returns:
            The seconds.
        """
        return self._seconds("all_gather", num_bytes, mesh_dim)

    def all_reduce_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Predict the seconds of an all-reduce of a tensor of so many bytes along an axis.

        Args:
            num_bytes: The bytes.
            mesh_dim: The axis.

        Returns:
            The seconds.
        """
        return self._seconds("all_reduce", num_bytes, mesh_dim)

    def reduce_scatter_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Predict the seconds of a reduce-scatter of a full tensor of so many bytes along an axis.

        Args:
            num_bytes: The bytes.
            mesh_dim: The axis.

        Returns:
            The seconds.
        """
        return self._seconds("reduce_scatter", num_bytes, mesh_dim)

    def all_to_all_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Predict the seconds of an all-to-all of a tensor of so many bytes along an axis.

        Args:
            num_bytes: The bytes.
            mesh_dim: The axis.

        Returns:
            The seconds.
        """
        return self._seconds("all_to_all", num_bytes, mesh_dim)

    def _seconds(self, op: LinkOp, num_bytes: float, axis: int) -> float:
        messages, fraction = collective_cost_factors(op, self.shape[axis])
        return self.mesh_alpha[axis] * messages + self.mesh_beta[axis] * fraction * num_bytes

    def _name(self, axis: int) -> Any:
        if not -len(self.shape) <= axis < len(self.shape):
            raise MeshError(f"The mesh has {len(self.shape)} axes. Found axis {axis}. Count from 0.")
        return self.grid.names[axis]

    def _link_cost(self) -> LinkCost:
        links = zip(self.grid.names, self.shape, self.mesh_alpha, self.mesh_beta, strict=True)
        return LinkCost(
            {name: AxisCost(size, Link(alpha, beta)) for name, size, alpha, beta in links if size >= _MIN_LINKED}
        )
