# pyright: reportUnknownMemberType=false
"""The processes of a program, arranged along named axes."""

import copy
import os
from collections.abc import Sequence
from contextvars import Token
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, final

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colossal._src.cluster.arrangement import MeshView, arrange, check_expert_ranks, fit_sizes, integers
from colossal._src.cluster.axes import AXES, Axis, MeshAxis
from colossal._src.cluster.context_var import InheritedContextVar
from colossal._src.cluster.tp_grid import TensorParallelMode, make_tp_grid
from colossal.accelerator import Accelerator, get_accelerator
from colossal.errors import MeshError

if TYPE_CHECKING:
    from colossal._src.cluster.link_cost import LinkCost

DEFAULT_TIMEOUT_SECONDS = 600.0

_T = TypeVar("_T")

_AMBIENT: InheritedContextVar["ParallelMesh | None"] = InheritedContextVar("colossal_mesh", None)


@final
class ParallelMesh:
    """All processes of the job on the axes pp, dp, sp and tp; ranks count along tp first.

    Entering a mesh makes it ambient: functions that take an optional mesh use it. `launch` makes one ambient that has
    all processes on dp.

    Args:
        pp: Number of pipeline stages.
        dp: Number of data-parallel replicas; by default as many as the other axes leave room for.
        sp: Number of ranks over which a sequence is sharded.
        tp: Number of ranks over which a layer is sharded.
        ep: Number of ranks over which the experts of a layer are sharded: consecutive ranks of a stage, whatever their
            places on dp, sp and tp.
        tp_mode: How these are arranged: ``"1d"``, ``"2d"`` (q x q), ``"2.5d"`` (depth x q x q) or ``"3d"`` (q x q x q).
        tp_depth: The depth of a 2.5D grid.
        device: ``"cpu"`` or ``"cuda"``; the device of this process by default.
        local_rank: Index of this process among those of its host; by default that of the ambient mesh, or the
            environment variable ``LOCAL_RANK``.
        timeout_seconds: How long a collective waits for a peer; by default as in the ambient mesh, or 600.
        link_cost: What it costs to send bytes along the axes, or a file of ``colossal benchmark --collectives``; by
            default as in the ambient mesh, or the file that the environment variable ``COLOSSAL_LINK_COST`` names.
        dp_outside: Give the ranks of a replica consecutive numbers, so that the stages of a pipeline are close to each
            other; otherwise the ranks of a stage.

    Attributes:
        world_size: Number of processes.
        global_rank: This process's number among all of them.
        shape: The size of each axis, by its name.
        grid: The size of each axis of the grid that the tp axis is, by its name; of ``tp`` itself in 1D.
        tp_mode: How the tp axis is arranged.
        coordinate: This process's index on each axis, by its name.
        accelerator: The device of this process.
        device_mesh: The same mesh as torch's own functions take it.
        link_cost: What it costs to send bytes along the axes; None if it was not measured.

    Raises:
        MeshError: There is no process group yet, the sizes do not multiply to its size, the tp axis has no such grid,
            or the costs of links are those of another backend or device.
        ConfigError: The file with the costs of links cannot be read.

    Example:
        >>> from colossal.testing import fake_world
        >>> with fake_world(8, rank=3):
        ...     mesh = ParallelMesh(pp=2, tp=2)
        ...     print(mesh, mesh.rank("dp"), mesh.ranks("dp"))
        ParallelMesh(pp=2, dp=2, sp=1, tp=2) 1 (1, 3)

    Communication: one group of processes is formed for each axis; all ranks must construct the same mesh.
    """

    coordinate: dict[MeshAxis, int]
    device_mesh: DeviceMesh

    def __init__(
        self,
        *,
        pp: int = 1,
        dp: int | None = None,
        sp: int = 1,
        tp: int = 1,
        ep: int = 1,
        tp_mode: TensorParallelMode = "1d",
        tp_depth: int | None = None,
        device: str | None = None,
        local_rank: int | None = None,
        timeout_seconds: float | None = None,
        link_cost: "LinkCost | str | Path | None" = None,
        dp_outside: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise MeshError(
                "A ParallelMesh arranges processes that have found each other. Found no process group. "
                "Call colossal.launch_from_torch() first."
            )
        outer = _AMBIENT.get()
        self.world_size = dist.get_world_size()
        self.global_rank = dist.get_rank()
        self.shape = dict(zip(AXES, fit_sizes(self.world_size, pp, dp, sp, tp), strict=True))
        self.tp_mode: TensorParallelMode = tp_mode
        self.grid = make_tp_grid(tp, tp_mode, tp_depth)
        self.local_rank = _first(local_rank, outer and outer.local_rank, _environment_rank(), self.global_rank)
        self.timeout_seconds = _first(timeout_seconds, outer and outer.timeout_seconds, DEFAULT_TIMEOUT_SECONDS)
        self.accelerator = get_accelerator(device)
        self.link_cost = _find_link_cost(link_cost, outer and outer.link_cost, self.accelerator)
        self._num_ep = check_expert_ranks(ep, self.shape)
        self._set_ranks(arrange(self.shape, dp_outside))
        self._tokens: list[tuple[Token[ParallelMesh | None], ParallelMesh | None]] = []

    def _set_ranks(self, ranks: torch.Tensor) -> None:
        """Find this process among all of them, of shape (pp, dp, sp, tp), and form the groups that it is in."""
        self.shape = dict(zip(AXES, ranks.shape, strict=True))
        self._ranks = ranks
        self.coordinate = dict(zip(AXES, integers((ranks == self.global_rank).nonzero()[0]), strict=True))
        sizes = {axis: size for axis, size in self.shape.items() if axis != "tp"} | self.grid
        experts = {"pp": self.shape["pp"], "edp": ranks[0].numel() // self._num_ep, "ep": self._num_ep}
        self._views = MeshView.of(ranks, sizes, self.global_rank), MeshView.of(ranks, experts, self.global_rank)
        self._sizes: dict[Axis, int] = {**self.shape}
        self._coordinates: dict[Axis, int] = {**self.coordinate}
        for view in self._views:
            self._sizes |= view.sizes
            self._coordinates |= view.place
        self.device_mesh = self._form_groups()
        groups: dict[Axis, dist.ProcessGroup] = {axis: self.device_mesh.get_group(axis) for axis in AXES}
        self._groups = groups | {axis: self._form_group(axis) for axis in self.grid if axis != "tp"}

    def __repr__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in self.shape.items()]
        grid = [] if self.tp_mode == "1d" else [f"tp_mode={self.tp_mode!r}"]
        depth = [f"tp_depth={self.grid['depth']}"] if "depth" in self.grid else []
        experts = [] if self._num_ep == 1 else [f"ep={self._num_ep}"]
        return f"ParallelMesh({', '.join(sizes + grid + depth + experts)})"

    def __enter__(self) -> Self:
        self._tokens.append(_AMBIENT.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _AMBIENT.reset(self._tokens.pop())

    def __deepcopy__(self, _memo: object) -> Self:
        """The processes are not copied with a model that knows them."""
        return self

    def size(self, axis: Axis) -> int:
        """Count the ranks along an axis.

        Args:
            axis: ``"pp"``, ``"dp"``, ``"sp"``, ``"tp"``, an axis of the grid that the latter is, ``"ep"`` or ``"edp"``.

        Returns:
            Their number, at least 1.

        Raises:
            MeshError: There is no such axis.
        """
        return self._sizes[self._check_axis(axis)]

    def rank(self, axis: Axis) -> int:
        """Find this process's place along an axis.

        Args:
            axis: ``"pp"``, ``"dp"``, ``"sp"``, ``"tp"``, an axis of the grid that the latter is, ``"ep"`` or ``"edp"``.

        Returns:
            Its index, from 0.

        Raises:
            MeshError: There is no such axis.
        """
        return self._coordinates[self._check_axis(axis)]

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """List the processes that this one meets along an axis, or along several.

        Args:
            *axes: ``"pp"``, ``"dp"``, ``"sp"``, ``"tp"`` or axes of its grid, or ``"edp"`` and ``"ep"``, each
                once; the last counts first.

        Returns:
            The global ranks that differ from this one in their index along these axes only, this one included.

        Raises:
            MeshError: There is no such axis, or it is named twice.
        """
        parts: list[Axis] = []
        for axis in axes:
            parts += self.grid if self._check_axis(axis) == "tp" else (axis,)
        if not parts or len(set(parts)) < len(parts):
            raise MeshError(f"Ranks are listed along axes, each named once. Found {axes}. Name each of them once.")
        view = next((view for view in self._views if view.sizes.keys() >= set(parts)), None)
        if view is None:
            raise MeshError(
                "Ranks are listed along axes of one view of the mesh: ep and edp arrange the ranks of dp, sp and tp "
                f"anew. Found {axes}. List the ranks of each by itself."
            )
        return view.list_along(parts)

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Find the process group of an axis.

        Args:
            axis: ``"pp"``, ``"dp"``, ``"sp"``, ``"tp"``, an axis of the grid that the latter is, ``"ep"`` or ``"edp"``.

        Returns:
            The group of `ranks(axis)`.

        Raises:
            MeshError: There is no such axis.

        Communication: none; for ``"ep"`` and ``"edp"`` the first call forms the group, and all of its ranks must call.
        """
        if self._check_axis(axis) not in self._groups:
            self._groups[axis] = self._form_group(axis)
        return self._groups[axis]

    def axes_of(self, group: dist.ProcessGroup) -> tuple[Axis, ...]:
        """Find the axes whose group this is.

        Args:
            group: A process group.

        Returns:
            Those of pp, dp, sp and tp with several ranks; where it is the group of none of them, ``"ep"`` or ``"edp"``;
            nothing for other groups.

        Communication: none; no group is formed.
        """
        views: tuple[tuple[Axis, ...], ...] = AXES, ("ep", "edp")
        for axes in views:
            found: list[Axis] = [axis for axis in axes if self._groups.get(axis) is group and self.size(axis) > 1]
            if found:
                return tuple(found)
        return ()

    def blocks(self, axis: Axis, length: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Split an axis into blocks of consecutive ranks.

        Args:
            axis: ``"pp"``, ``"dp"``, ``"sp"``, ``"tp"``, an axis of the grid that the latter is, ``"ep"`` or ``"edp"``.
            length: Number of ranks in a block; it divides the size of the axis.

        Returns:
            The group of this process' block, and the group of those that have its place in the other blocks.

        Raises:
            MeshError: There is no such axis, or the length does not divide its size.

        Communication: two groups of processes are formed; all ranks of the axis must call.
        """
        ranks, place = self.ranks(axis), self.rank(axis)
        if length < 1 or len(ranks) % length:
            raise MeshError(
                f"An axis is split into blocks of one length. Found {length} for the {len(ranks)} ranks of {axis!r}. "
                "Pass a divisor of their number."
            )
        block = place // length
        own = ranks[block * length : (block + 1) * length]
        return self.group_of(own), self.group_of(ranks[place % length :: length])

    def fold_sp_into_dp(self) -> "ParallelMesh":
        """Count sequence-parallel ranks as data-parallel ones, since parameters are treated the same way on both axes.

        Returns:
            A mesh of the same processes with the same coordinates on pp and tp, whose dp axis has the ranks of dp and
            sp; this mesh itself if sp is 1.

        Communication: new groups of processes are formed; all ranks must call.
        """
        if self.size("sp") == 1:
            return self
        folded = copy.copy(self)
        # Both would have one list, and leaving one mesh would end the scope of the other.
        folded._tokens = []  # noqa: SLF001 (of this class)
        folded._set_ranks(self._ranks.flatten(1, 2).unsqueeze(2))  # noqa: SLF001 (of this class)
        return folded

    def _check_axis(self, axis: Axis) -> Axis:
        if axis not in self._sizes:
            names = ", ".join(self._sizes)
            raise MeshError(f"The axes of this mesh are {names}. Found {axis!r}. Pass one of them.")
        return axis

    def _form_groups(self) -> DeviceMesh:
        return DeviceMesh.from_group(
            [self._form_group(axis) for axis in AXES], self.accelerator.name, mesh=self._ranks, mesh_dim_names=AXES
        )

    def _form_group(self, axis: Axis) -> dist.ProcessGroup:
        if self.size(axis) == self.world_size and dist.group.WORLD is not None:
            # The default group has these connections already.
            return dist.group.WORLD
        return self.group_of(self.ranks(axis))

    def group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Form the group of some ranks, this one among them.

        Args:
            ranks: Global ranks.

        Returns:
            A new group, with the timeout of the mesh.

        Communication: a group of processes is formed; all of these ranks must call.
        """
        timeout = timedelta(seconds=self.timeout_seconds)
        # Synchronized locally: otherwise all processes would have to call for every group, also those of other ranks.
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group


def current_mesh() -> ParallelMesh:
    """Find the mesh that is in force.

    Returns:
        The ambient mesh; without one, a new one with all processes on dp, which is ambient from then on.

    Raises:
        MeshError: There is no process group yet.

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


def ambient_mesh() -> ParallelMesh | None:
    """Look whether a mesh is in force."""
    return _AMBIENT.get()


def set_ambient_mesh(mesh: ParallelMesh | None) -> None:
    """Make `mesh` ambient without a scope: what `launch` does for the life of the program, and undoes with None."""
    _AMBIENT.set(mesh)


def _find_link_cost(
    given: "LinkCost | str | Path | None", inherited: "LinkCost | None", accelerator: Accelerator
) -> "LinkCost | None":
    from colossal._src.cluster.link_cost import ENVIRONMENT_VARIABLE, LinkCost, link_cost_from_environment

    if given is not None:
        costs = given if isinstance(given, LinkCost) else LinkCost.load(given)
    else:
        costs = inherited or link_cost_from_environment()
    origin, backend = costs and costs.origin, dist.get_backend()
    if origin and backend != "fake" and (origin.backend, origin.device) != (backend, accelerator.name):
        raise MeshError(
            f"The costs of links must be those of the backend in use, {backend} on {accelerator.name}. Found costs of "
            f"{origin.backend} on {origin.device}, measured on {', '.join(origin.hosts)} at {origin.measured_at}. "
            f"Measure again with colossal benchmark --collectives, or unset {ENVIRONMENT_VARIABLE}."
        )
    return costs


def _environment_rank() -> int | None:
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdigit() else None


def _first(*choices: _T | None) -> _T:
    return next(choice for choice in choices if choice is not None)
