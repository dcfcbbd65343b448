"""The groups of a process: those of the ambient mesh under their older names, and those that a program adds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, ambient_mesh, current_mesh, host_group
from colossal._src.legacy.context.parallel_mode import ParallelMode
from colossal.errors import MeshError

Axes = tuple[str, ...]

# The columns of a 2D grid are the ranks above each other, along which the index on our axis `row` changes.
_GRIDS: Mapping[str, Mapping[ParallelMode, Axes]] = {
    "1d": {ParallelMode.PARALLEL_1D: ("tp",)},
    "2d": {ParallelMode.PARALLEL_2D_ROW: ("col",), ParallelMode.PARALLEL_2D_COL: ("row",)},
    "2.5d": {
        ParallelMode.PARALLEL_2P5D_ROW: ("col",),
        ParallelMode.PARALLEL_2P5D_COL: ("row",),
        ParallelMode.PARALLEL_2P5D_DEP: ("depth",),
        ParallelMode.PARALLEL_2P5D_XZ: ("depth", "row"),
    },
    "3d": {
        ParallelMode.PARALLEL_3D_INPUT: ("input",),
        ParallelMode.PARALLEL_3D_WEIGHT: ("weight",),
        ParallelMode.PARALLEL_3D_OUTPUT: ("output",),
        ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT: ("weight", "input"),
        ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT: ("weight", "output"),
    },
}


@dataclass(frozen=True)
class OwnGroup:
    """A group that a program has formed itself."""

    local_rank: int
    size: int
    group: dist.ProcessGroup | None
    cpu_group: dist.ProcessGroup | None
    ranks: tuple[int, ...]


@dataclass
class _State:
    """What a program adds to a mesh."""

    groups: dict[ParallelMode, OwnGroup] = field(default_factory=dict)
    virtual_size: int | None = None
    virtual_rank: int | None = None


class MeshGroups:
    """The groups of the ambient mesh, by parallel mode."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[ParallelMesh, _State] = WeakKeyDictionary()

    def is_initialized(self, parallel_mode: ParallelMode) -> bool:
        """Whether this process is in a group of a mode.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            True if it is; False too where there are no processes, no such group, or a pipeline or a tensor-parallel
            group of one process.
        """
        mesh = ambient_mesh()
        return mesh is not None and (parallel_mode in self._state.groups or self._axes(parallel_mode) is not None)

    def get_ranks_in_group(self, parallel_mode: ParallelMode) -> list[int]:
        """List the processes of this process's group of a mode.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            Their global ranks, in their order in the group.

        Raises:
            MeshError: There is no such group.
        """
        own = self._own(parallel_mode)
        if own is not None:
            return list(own.ranks)
        if parallel_mode is ParallelMode.GLOBAL:
            return list(range(current_mesh().world_size))
        return list(current_mesh().ranks(*self._require(parallel_mode)))  # type: ignore[arg-type]

    def get_world_size(self, parallel_mode: ParallelMode) -> int:
        """Count the processes of this process's group of a mode.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            Their number.

        Raises:
            MeshError: There is no such group.
        """
        return len(self.get_ranks_in_group(parallel_mode))

    def get_local_rank(self, parallel_mode: ParallelMode) -> int:
        """Find the place of this process in its group of a mode.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            Its index, from 0.

        Raises:
            MeshError: There is no such group.
        """
        own = self._own(parallel_mode)
        return (
            own.local_rank if own is not None else self.get_ranks_in_group(parallel_mode).index(self.get_global_rank())
        )

    def get_global_rank(self) -> int:
        """Find the number of this process among all.

        Returns:
            The global rank.
        """
        return current_mesh().global_rank

    def get_group(self, parallel_mode: ParallelMode) -> dist.ProcessGroup:
        """Find the process group of a mode.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            The group that this process is in.

        Raises:
            MeshError: There is no such group.

        Communication: where the mode spans several axes of the mesh, the group is formed by the first call, which all
        its ranks make.
        """
        own = self._own(parallel_mode)
        if own is None:
            own = self._form(parallel_mode)
        if own.group is None:
            raise MeshError(f"{parallel_mode} has ranks and no process group. Let its initializer return one.")
        return own.group

    def get_cpu_group(self, parallel_mode: ParallelMode) -> dist.ProcessGroup:
        """Find the process group of a mode for tensors in host memory.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            The group that this process is in.

        Raises:
            MeshError: There is no such group.

        Communication: as in `get_group`; on an accelerator the first call forms another group.
        """
        own = self._own(parallel_mode)
        if own is not None and own.cpu_group is not None:
            return own.cpu_group
        return host_group(self.get_group(parallel_mode))

    def get_next_global_rank(self, parallel_mode: ParallelMode) -> int:
        """Find the process that follows this one in its group of a mode; the first follows the last.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            Its global rank.

        Raises:
            MeshError: There is no such group.
        """
        return self._neighbor(parallel_mode, 1)

    def get_prev_global_rank(self, parallel_mode: ParallelMode) -> int:
        """Find the process that precedes this one in its group of a mode; the last precedes the first.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            Its global rank.

        Raises:
            MeshError: There is no such group.
        """
        return self._neighbor(parallel_mode, -1)

    def is_first_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether this process is the first of its group of a mode.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            True if it is.

        Raises:
            MeshError: There is no such group.
        """
        return self.get_local_rank(parallel_mode) == 0

    def is_last_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether this process is the last of its group of a mode.

        Args:
            parallel_mode: One of `ParallelMode`.

        Returns:
            True if it is.

        Raises:
            MeshError: There is no such group.
        """
        return self.get_local_rank(parallel_mode) == self.get_world_size(parallel_mode) - 1

    def add_group(
        self,
        local_rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        cpu_group: dist.ProcessGroup | None,
        ranks: Iterable[int],
        mode: ParallelMode,
    ) -> None:
        """Make a group that the program has formed that of a mode.

        Args:
            local_rank: The index of this process in the group.
            size: Number of its ranks.
            group: The process group.
            cpu_group: One of the same ranks for tensors in host memory; None to form it when it is asked for.
            ranks: The global ranks.
            mode: One of `ParallelMode`.
        """
        self._state.groups[mode] = OwnGroup(local_rank, size, group, cpu_group, tuple(ranks))

    @property
    def _state(self) -> _State:
        return self._states.setdefault(current_mesh(), _State())

    def _own(self, mode: ParallelMode) -> OwnGroup | None:
        if ambient_mesh() is None and not dist.is_initialized():
            return None
        return self._state.groups.get(mode)

    def _axes(self, mode: ParallelMode) -> Axes | None:
        """The axes that a mode spans; None if it has no group."""
        mesh = current_mesh()
        tensor = ("sp",) if mesh.size("tp") == 1 and mesh.size("sp") > 1 else ("tp",)
        spans: dict[ParallelMode, Axes] = {
            ParallelMode.GLOBAL: ("pp", "dp", "sp", "tp"),
            ParallelMode.DATA: ("dp",),
            ParallelMode.MODEL: ("pp", "sp", "tp"),
            ParallelMode.PIPELINE: ("pp",),
            ParallelMode.TENSOR: tensor,
            ParallelMode.SEQUENCE: ("sp",),
            ParallelMode.SEQUENCE_DP: ("dp", "sp"),
            **_GRIDS[mesh.tp_mode],
        }
        axes = spans.get(mode)
        if mode in {ParallelMode.GLOBAL, ParallelMode.DATA} or axes is None:
            return axes
        if mode in _GRIDS[mesh.tp_mode] and mesh.size("tp") > 1:
            return axes  # a grid may be one rank deep, and has all of its groups
        needed = ("sp",) if mode is ParallelMode.SEQUENCE_DP else axes
        return axes if any(mesh.size(axis) > 1 for axis in needed) else None  # type: ignore[arg-type]

    def _require(self, mode: ParallelMode) -> Axes:
        axes = self._axes(mode)
        if axes is None:
            there = ", ".join(each.name for each in ParallelMode if self.is_initialized(each))
            raise MeshError(
                f"A process asks for a group that it is in. Found {mode}; the groups of {current_mesh()} are {there}. "
                "Ask is_initialized first, or launch with parallel=dict(...) that forms it."
            )
        return axes

    def _form(self, mode: ParallelMode) -> OwnGroup:
        """The group of a mode of the mesh, which is remembered."""
        axes, mesh = self._require(mode), current_mesh()
        ranks = tuple(self.get_ranks_in_group(mode))
        if len(ranks) == mesh.world_size and dist.group.WORLD is not None:
            group = dist.group.WORLD
        elif len(axes) == 1:
            group = mesh.group(axes[0])  # type: ignore[arg-type]
        else:
            group = mesh.group_of(ranks)
        own = OwnGroup(ranks.index(mesh.global_rank), len(ranks), group, None, ranks)
        self._state.groups[mode] = own
        return own

    def _neighbor(self, mode: ParallelMode, step: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(self.get_local_rank(mode) + step) % len(ranks)]
