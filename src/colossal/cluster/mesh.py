"""The processes of a program, arranged along named axes."""

import math
import os
from contextvars import ContextVar, Token
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, final

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colossal.accelerator import Accelerator, get_accelerator
from colossal.cluster.axes import AXES, Axis
from colossal.cluster.link_cost import ENVIRONMENT_VARIABLE, LinkCost, link_cost_of_environment
from colossal.errors import MeshError

DEFAULT_TIMEOUT_SECONDS = 600.0

_T = TypeVar("_T")

_AMBIENT: ContextVar["ParallelMesh | None"] = ContextVar("colossal_mesh", default=None)


@final
class ParallelMesh:
    """All processes of the world on the axes pp, dp, sp and tp; ranks count along tp first.

    Entering a mesh makes it ambient: functions that take an optional mesh use it. `launch` leaves one behind that has
    all processes on dp.

    Args:
        pp: Number of pipeline stages.
        dp: Number of data-parallel replicas; by default as many as the other axes leave room for.
        sp: Number of ranks that share a sequence.
        tp: Number of ranks that share a tensor.
        device: ``"cpu"`` or ``"cuda"``; the device of this process by default.
        local_rank: Index of this process among those of its host; by default that of the ambient mesh, or the
            environment variable ``LOCAL_RANK``.
        timeout_seconds: How long a collective waits for a peer; by default as in the ambient mesh, or 600.
        link_cost: What it costs to send bytes along the axes, or a file of ``colossal benchmark --collectives``; by
            default as in the ambient mesh, or the file that the environment variable ``COLOSSAL_LINK_COST`` names.

    Attributes:
        world_size: Number of processes.
        global_rank: This process's number among all of them.
        shape: The size of each axis, by its name.
        coordinate: This process's index on each axis, by its name.
        accelerator: The device of this process.
        device_mesh: The same mesh as torch's own functions take it.
        link_cost: What it costs to send bytes along the axes; None if nobody has measured it.

    Raises:
        MeshError: There is no world yet, the sizes do not multiply to its size, or the costs of links are those of
            another backend or device.
        ConfigError: The file with the costs of links cannot be read.

    Example:
        >>> from colossal.testing import fake_world
        >>> with fake_world(8, rank=3):
        ...     mesh = ParallelMesh(pp=2, tp=2)
        ...     print(mesh, mesh.rank("dp"), mesh.ranks("dp"))
        ParallelMesh(pp=2, dp=2, sp=1, tp=2) 1 (1, 3)

    Communication: one group of processes is formed for each axis; all ranks must construct the same mesh.
    """

    def __init__(
        self,
        *,
        pp: int = 1,
        dp: int | None = None,
        sp: int = 1,
        tp: int = 1,
        device: str | None = None,
        local_rank: int | None = None,
        timeout_seconds: float | None = None,
        link_cost: LinkCost | str | Path | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise MeshError(
                "A ParallelMesh arranges processes that have found each other. Found no process group. "
                "Call colossal.launch_from_torch() first."
            )
        outer = _AMBIENT.get()
        self.world_size = dist.get_world_size()
        self.global_rank = dist.get_rank()
        self.shape = dict(zip(AXES, _fit_sizes(self.world_size, pp, dp, sp, tp), strict=True))
        self.local_rank = _first(local_rank, outer and outer.local_rank, _environment_rank(), self.global_rank)
        self.timeout_seconds = _first(timeout_seconds, outer and outer.timeout_seconds, DEFAULT_TIMEOUT_SECONDS)
        self.accelerator = get_accelerator(device)
        self.link_cost = _find_link_cost(link_cost, outer and outer.link_cost, self.accelerator)
        self._grid = torch.arange(self.world_size).view(*self.shape.values())
        self.coordinate = dict(zip(AXES, (self._grid == self.global_rank).nonzero()[0].tolist(), strict=True))
        self.device_mesh = self._form_groups()
        self._tokens: list[Token[ParallelMesh | None]] = []

    def __repr__(self) -> str:
        return f"ParallelMesh({', '.join(f'{axis}={size}' for axis, size in self.shape.items())})"

    def __enter__(self) -> Self:
        self._tokens.append(_AMBIENT.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _AMBIENT.reset(self._tokens.pop())

    def size(self, axis: Axis) -> int:
        """Count the ranks along an axis.

        Args:
            axis: ``"pp"``, ``"dp"``, ``"sp"`` or ``"tp"``.

        Returns:
            Their number, at least 1.

        Raises:
            MeshError: There is no such axis.
        """
        return self.shape[_check_axis(axis)]

    def rank(self, axis: Axis) -> int:
        """Find this process's place along an axis.

        Args:
            axis: ``"pp"``, ``"dp"``, ``"sp"`` or ``"tp"``.

        Returns:
            Its index, from 0.

        Raises:
            MeshError: There is no such axis.
        """
        return self.coordinate[_check_axis(axis)]

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """List the processes that this one meets along an axis, or along several.

        Args:
            axes: ``"pp"``, ``"dp"``, ``"sp"`` or ``"tp"``, each once; the last one is counted along first.

        Returns:
            The global ranks that differ from this one in their index along these axes only, this one included.

        Raises:
            MeshError: There is no such axis, or it is named twice.
        """
        for axis in axes:
            _check_axis(axis)
        if not axes or len(set(axes)) < len(axes):
            raise MeshError(f"Ranks are listed along axes, each named once. Found {axes}. Name each of them once.")
        index = tuple(slice(None) if name in axes else at for name, at in self.coordinate.items())
        order = [name for name in AXES if name in axes]
        return tuple(self._grid[index].permute([order.index(axis) for axis in axes]).flatten().tolist())

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Find the process group of an axis.

        Args:
            axis: ``"pp"``, ``"dp"``, ``"sp"`` or ``"tp"``.

        Returns:
            The group of `ranks(axis)`.

        Raises:
            MeshError: There is no such axis.
        """
        return self.device_mesh.get_group(_check_axis(axis))

    def _form_groups(self) -> DeviceMesh:
        return DeviceMesh.from_group(
            [self._form_group(axis) for axis in AXES], self.accelerator.name, mesh=self._grid, mesh_dim_names=AXES
        )

    def _form_group(self, axis: Axis) -> dist.ProcessGroup:
        if self.shape[axis] == self.world_size and dist.group.WORLD is not None:
            return dist.group.WORLD
        timeout = timedelta(seconds=self.timeout_seconds)
        group = dist.new_group(list(self.ranks(axis)), timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group


def current_mesh() -> ParallelMesh:
    """Find the mesh that is in force.

    Returns:
        The ambient mesh; without one, a new one with all processes of the world on dp, which is ambient from then on.

    Raises:
        MeshError: There is no world yet.

    Example:
        >>> from colossal.cluster import ParallelMesh, current_mesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(4):
        ...     print(current_mesh())
        ...     with ParallelMesh(tp=2):
        ...         print(current_mesh())
        ParallelMesh(pp=1, dp=4, sp=1, tp=1)
        ParallelMesh(pp=1, dp=2, sp=1, tp=2)
    """
    mesh = _AMBIENT.get()
    if mesh is None:
        mesh = ParallelMesh()
        _AMBIENT.set(mesh)
    return mesh


def leave_ambient(mesh: ParallelMesh | None) -> None:
    """Make `mesh` ambient without a scope: what `launch` does for the life of the program, and undoes with None."""
    _AMBIENT.set(mesh)


def _fit_sizes(world_size: int, pp: int, dp: int | None, sp: int, tp: int) -> tuple[int, int, int, int]:
    given = {"pp": pp, "dp": 1 if dp is None else dp, "sp": sp, "tp": tp}
    for axis, size in given.items():
        if not isinstance(size, int) or size < 1:
            raise MeshError(
                f"The size of an axis is a whole number, at least 1. Found {axis}={size!r}. Pass 1 or more."
            )
    taken = math.prod(given.values())
    if dp is None and world_size % taken == 0:
        return pp, world_size // taken, sp, tp
    if taken != world_size:
        sizes = " x ".join(f"{axis} {size}" for axis, size in given.items() if axis != "dp" or dp is not None)
        verb, fitting = ("equal", taken) if dp else ("divide", max(1, round(world_size / taken)) * taken)
        raise MeshError(
            f"The product of the axes must {verb} the number of processes. Found {sizes} = {taken} "
            f"in a world of {world_size}. Change a size, or start {fitting} processes."
        )
    return pp, given["dp"], sp, tp


def _find_link_cost(
    given: LinkCost | str | Path | None, inherited: LinkCost | None, accelerator: Accelerator
) -> LinkCost | None:
    if given is not None:
        costs = given if isinstance(given, LinkCost) else LinkCost.load(given)
    else:
        costs = inherited or link_cost_of_environment()
    origin, backend = costs and costs.origin, dist.get_backend()
    if origin and backend != "fake" and (origin.backend, origin.device) != (backend, accelerator.name):
        raise MeshError(
            f"The costs of links must be those of the backend in use, {backend} on {accelerator.name}. Found costs of "
            f"{origin.backend} on {origin.device}, measured on {', '.join(origin.hosts)} at {origin.measured_at}. "
            f"Measure again with colossal benchmark --collectives, or unset {ENVIRONMENT_VARIABLE}."
        )
    return costs


def _check_axis(axis: Axis) -> Axis:
    if axis not in AXES:
        raise MeshError(f"The axes of a mesh are {', '.join(AXES)}. Found {axis!r}. Pass one of them.")
    return axis


def _environment_rank() -> int | None:
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdigit() else None


def _first(*choices: _T | None) -> _T:
    return next(choice for choice in choices if choice is not None)
