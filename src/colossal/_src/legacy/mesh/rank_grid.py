# pyright: reportUnknownMemberType=false
"""Any ranks on a grid of up to four axes, for what a `ParallelMesh` cannot express: some ranks only, in any order."""

from collections.abc import Sequence
from itertools import product
from typing import Any, Self, cast, final

import torch
from torch import distributed as dist

from colossal._src.cluster import AXES, Axis, LinkCost, ParallelMesh, TensorParallelMode, ambient_mesh
from colossal.accelerator import Accelerator, get_accelerator
from colossal.errors import MeshError

_NAMES: tuple[tuple[Axis, ...], ...] = ((), ("tp",), ("dp", "tp"), ("pp", "dp", "tp"), AXES)
"""What the axes of a grid are called where those of a mesh have names, by their number."""


@final
class RankGrid:
    """Offers of a mesh what collectives and conversions of layouts ask for.

    It can describe a grid without process groups; these are formed when one of them is first used.
    """

    tp_mode: TensorParallelMode = "1d"
    timeout_seconds = 600.0

    def __init__(self, ranks: torch.Tensor, link_cost: LinkCost | None = None) -> None:
        if not 1 <= ranks.dim() < len(_NAMES):
            raise MeshError(
                f"A grid of ranks has 1 to {len(_NAMES) - 1} axes. Found the shape {tuple(ranks.shape)}. Pass a tensor "
                "of ranks with as many dimensions."
            )
        self.array = ranks.to("cpu", torch.int64)
        self.names = _NAMES[ranks.dim()]
        self.shape = tuple(ranks.shape)
        self.link_cost = link_cost
        numbers: list[int] = self.array.flatten().tolist()
        self._places = dict(zip(numbers, product(*map(range, self.shape)), strict=True))
        if len(self._places) != len(numbers):
            raise MeshError(f"A grid has each rank once. Found {numbers}. Pass different ranks.")
        self._groups: dict[Axis, dist.ProcessGroup] = {}

    def __deepcopy__(self, _memo: object) -> Self:
        """The processes are not copied with what knows them."""
        return self

    def __repr__(self) -> str:
        return f"RankGrid({self.array.tolist()})"

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks on the grid."""
        return len(self._places)

    @property
    def accelerator(self) -> Accelerator:
        """The device of this process."""
        return get_accelerator()

    @property
    def grid(self) -> dict[Axis, int]:
        """The tp axis, which is no grid itself."""
        return {"tp": self.size("tp")}

    def place_of(self, rank: int) -> tuple[int, ...]:
        """Return the index of a global rank on each axis."""
        if rank not in self._places:
            raise MeshError(
                f"A rank has a place on a grid that it is on. Found rank {rank}, and the grid {self.array.tolist()}. "
                "Ask one of its ranks."
            )
        return self._places[rank]

    def size(self, axis: Axis) -> int:
        """Count the ranks along an axis; 1 for an axis that the grid does not have."""
        return self.shape[self.names.index(axis)] if axis in self.names else 1

    def rank(self, axis: Axis) -> int:
        """Return the index of this process along an axis."""
        return self.place_of(self.global_rank)[self.names.index(axis)] if axis in self.names else 0

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """List the global ranks that differ from this one along some axes only; the last axis counts first."""
        return self.ranks_from(self.global_rank, axes)

    def ranks_from(self, rank: int, axes: Sequence[Axis]) -> tuple[int, ...]:
        """List the global ranks that differ from a given one along some axes only."""
        known = [axis for axis in axes if axis in self.names]
        place = self.place_of(rank)
        index = tuple(slice(None) if name in known else at for name, at in zip(self.names, place, strict=True))
        order = [name for name in self.names if name in known]
        found = self.array[index].permute([order.index(axis) for axis in known])
        return tuple(cast("list[int]", found.flatten().tolist()))

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis."""
        if axis not in self._groups:
            self._groups[axis] = form_group(self.ranks(axis))
        return self._groups[axis]

    def blocks(self, axis: Axis, length: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Form the groups of blocks of consecutive ranks along an axis, as `ParallelMesh.blocks` does."""
        ranks, place = self.ranks(axis), self.rank(axis)
        own = ranks[place // length * length :][:length]
        group = dist.new_group(list(own), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group, form_group(ranks[place % length :: length])

    def set_group(self, axis: Axis, group: dist.ProcessGroup) -> None:
        """Use a process group that exists."""
        self._groups[axis] = group

    def as_mesh(self) -> ParallelMesh:
        """Return it for a function that asks a mesh for nothing else than what it has."""
        return cast("ParallelMesh", cast("Any", self))


def grid_of_group(group: dist.ProcessGroup | None = None) -> ParallelMesh:
    """Return a mesh whose tp axis is a process group; None stands for that of the ambient mesh, or for all ranks."""
    ambient = ambient_mesh()
    if group is None and ambient is not None and ambient.size("tp") > 1:
        return ambient
    if group is None and not dist.is_initialized():
        raise MeshError(
            "A layer is sharded over processes that have found each other. Found no process group. Call "
            "colossal.launch_from_torch() first."
        )
    found = group or dist.group.WORLD
    assert found is not None
    ranks = dist.get_process_group_ranks(found)
    if ambient is not None and list(ambient.ranks("tp")) == ranks:
        return ambient
    grid = RankGrid(torch.tensor(ranks, device="cpu"))
    grid.set_group("tp", found)
    return grid.as_mesh()


def form_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Form the process group of some ranks, which alone must call; that of all ranks exists already.

    The name of a group counts those that its ranks have formed before, so that all of them must have formed as many.

    Communication: the ranks of the group open connections.
    """
    world = dist.group.WORLD
    if world is not None and list(ranks) == list(range(dist.get_world_size())) and backend in (None, _backend_of()):
        return world
    group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def form_further_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Form a new group of some ranks; another rank, which must call too, forms one of itself, and has formed as many.

    Communication: the ranks of the group open connections.
    """
    own = dist.get_rank()
    members = list(ranks) if own in ranks else [own]
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _backend_of() -> str:
    return str(dist.get_backend())
