"""Over which ranks a parameter is data-parallel: who holds the same shard of it, and computes with other samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import Channel
from colossal._src.tensor.introspection import local_of, placement_of
from colossal._src.tensor.placement import Placement
from colossal.errors import PlanError

DATA: Axis = "dp"
"""Along which ranks see different samples; what all of them hold is averaged, partitioned and broadcast over it."""

_TensorT = TypeVar("_TensorT", bound=torch.Tensor)


@final
@dataclass(frozen=True)
class Replicas:
    """The ranks over which one parameter is averaged, partitioned and started from equal values.

    Beside its `Placement`, which says where the rest of the parameter is, this is all that data parallelism needs to
    know of it. For most parameters these are the ranks of the dp axis. Experts, which are sharded over some of these,
    get the gradients of all samples of their ep ranks in one backward pass, and are replicated over the edp axis.

    Args:
        mesh: On whose dp axis are all ranks that compute gradients of different samples or tokens.
        axis: The axis along which ranks hold the same shard.
    """

    mesh: ParallelMesh
    axis: Axis = DATA

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shard."""
        return self.mesh.group(self.axis)

    @property
    def size(self) -> int:
        """Number of them."""
        return self.mesh.size(self.axis)

    @property
    def num_means(self) -> int:
        """Number of mean losses whose gradients are summed up: the sum over the group, divided by it, is the mean."""
        return self.mesh.size(DATA)

    @property
    def has_others(self) -> bool:
        """Whether other ranks see other samples of the parameter; these may all be ranks of ep, and in no group."""
        return max(self.size, self.num_means) > 1

    def channel(self) -> Channel:
        """Return the collectives among these ranks."""
        return Channel(self.axis, self.mesh)

    def scale_each_pass(self, parameter: torch.Tensor) -> None:
        """Scale what each backward pass adds, so that the mean over the group is that of all mean losses.

        Gradients may then be averaged after each of several passes that add up, or once after all: an average is the
        same on all ranks of the group, and averaging it again leaves it as it is.

        Args:
            parameter: One of these replicas, once; frozen ones may be thawed later.
        """
        if self.size == self.num_means:
            return
        trains = parameter.requires_grad
        parameter.requires_grad_(True)  # torch takes hooks only of what trains, and keeps them
        hook = partial(torch.mul, self.size / self.num_means)
        parameter.register_hook(hook)  # pyright: ignore[reportUnknownMemberType] (torch types it so)
        parameter.requires_grad_(trains)


def replicas_of(tensor: torch.Tensor, mesh: ParallelMesh) -> Replicas:
    """Find the ranks over which a parameter, or a tensor that is placed like one, is data-parallel.

    Raises:
        PlanError: It is sharded over ranks of the dp axis, and not over those of ep.
    """
    placement = placement_of(tensor)
    if placement.is_compute_sharded and {*placement.layout.ranks} == {*mesh.ranks("ep")}:
        # where these are the same ranks, one group serves both
        return Replicas(mesh, DATA if {*mesh.ranks("edp")} == {*mesh.ranks(DATA)} else "edp")
    if _is_replicated(placement, mesh, DATA):
        return Replicas(mesh)
    raise PlanError(
        f"A parameter is sharded over ranks of tp or ep, and replicated over others. Found one of the shape "
        f"{placement.shape}, sharded over the ranks {placement.layout.ranks} of {mesh}, which compute gradients of "
        "different samples. Enter the mesh of the model first, and let the booster be made inside."
    )


def group_by_replicas(tensors: Iterable[_TensorT], mesh: ParallelMesh) -> dict[Replicas, list[_TensorT]]:
    """Split tensors by the ranks over which they are data-parallel; in the same order on all ranks."""
    groups: dict[Replicas, list[_TensorT]] = {}
    for tensor in tensors:
        groups.setdefault(replicas_of(tensor, mesh), []).append(tensor)
    return groups


def broadcast_values(tensors: Iterable[torch.Tensor], mesh: ParallelMesh, also: Sequence[Axis] = ()) -> None:
    """Give each tensor the values of the first of the ranks that hold the same shard of it.

    Args:
        tensors: As many as on every other rank, in the same order.
        mesh: Their mesh, as of `Replicas`.
        also: Axes along which ranks hold the same values as well, unless they hold different shards.

    Communication: broadcast, dp and `also`, the tensors' bytes.
    """
    tensors = list(tensors)
    for axis in also:
        same = [each for each in tensors if _is_replicated(placement_of(each), mesh, axis)]
        Channel(axis, mesh).broadcast([local_of(each) for each in same])
    for replicas, group in group_by_replicas(tensors, mesh).items():
        replicas.channel().broadcast([local_of(each) for each in group])


def _is_replicated(placement: Placement, mesh: ParallelMesh, axis: Axis) -> bool:
    """Whether all ranks along an axis hold the same shard."""
    return not placement.is_compute_sharded or len({*mesh.ranks(axis)} & {*placement.layout.ranks}) <= 1
