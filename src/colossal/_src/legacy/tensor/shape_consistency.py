"""Conversions between two shardings of a tensor, by the older names."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.tensor.mesh_sharding import (
    CollectiveCommPattern,
    CommSpec,
    MeshShardingSpec,
    bytes_around,
)
from colossal._src.tensor import Layout, RelayoutStep, greedy_path, one_step_layouts, relayout
from colossal.errors import PlanError

Cost = dict[str, float]
"""Seconds ``forward``, ``backward`` and in ``total``."""
_Successors = dict[MeshShardingSpec, tuple[CommSpec, Cost]]
_PATTERNS = {
    "all_gather": CollectiveCommPattern.GATHER_FWD_SPLIT_BWD,
    "all_to_all": CollectiveCommPattern.ALL2ALL_FWD_ALL2ALL_BWD,
    "shard": CollectiveCommPattern.SPLIT_FWD_GATHER_BWD,
}
ONE_STEP = tuple(_PATTERNS)
"""All that converts a sharding by one collective."""
_ATTR = "sharding_spec"
_FREE: Cost = {"forward": 0.0, "backward": 0.0, "total": 0.0}


@final
class ShapeConsistencyManager:
    """Finds how a tensor goes from one sharding to another, and converts it.

    Superseded by `colossal.tensor.plan_relayout` and `colossal.tensor.relayout`.

    Attributes:
        cached_spec_pairs_transform_path: The path and the collectives of the last call of `shape_consistency` for each
            pair of sharding sequences, as text.

    Example:
        >>> import torch
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.legacy.shape_consistency import MeshShardingSpec, ShapeConsistencyManager
        >>> mesh = DeviceMesh(torch.arange(4), (2, 2))
        >>> source, target = (MeshShardingSpec(mesh, (8, 8, 8), {dim: [0, 1]}) for dim in (0, 1))
        >>> path, actions, cost = ShapeConsistencyManager().shape_consistency(source, target)
        >>> [spec.sharding_sequence for spec in path]
        [[S01, R, R], [S0, R, R], [R, S0, R], [R, S01, R]]
        >>> actions[0]
        CommSpec:(comm_pattern:GATHER_FWD_SPLIT_BWD, gather_dim:0, logical_process_axis:1)
    """

    def __init__(self) -> None:
        superseded("ShapeConsistencyManager", "plan_relayout(source, target, itemsize), relayout(...)")
        self.cached_spec_pairs_transform_path: dict[tuple[str, str], tuple[list[MeshShardingSpec], list[CommSpec]]] = {}

    def get_all_all_gather_spec(self, source_spec: MeshShardingSpec, orig_cost_dict: Cost) -> _Successors:
        """List what is one all-gather away.

        Args:
            source_spec: The sharding.
            orig_cost_dict: What was paid before.

        Returns:
            For each sharding the collective, and what is paid with it.
        """
        return self._successors(source_spec, orig_cost_dict, "all_gather")

    def get_all_all_to_all_spec(self, source_spec: MeshShardingSpec, orig_cost_dict: Cost) -> _Successors:
        """List what is one all-to-all away.

        Args:
            source_spec: The sharding.
            orig_cost_dict: What was paid before.

        Returns:
            For each sharding the collective, and what is paid with it.
        """
        return self._successors(source_spec, orig_cost_dict, "all_to_all")

    def get_all_shard_spec(self, source_spec: MeshShardingSpec, orig_cost_dict: Cost) -> _Successors:
        """List what is one split away.

        Args:
            source_spec: The sharding.
            orig_cost_dict: What was paid before.

        Returns:
            For each sharding the split, and what is paid with it.
        """
        return self._successors(source_spec, orig_cost_dict, "shard")

    def get_all_mix_gather_spec(self, source_spec: MeshShardingSpec, orig_cost_dict: Cost) -> _Successors:
        """List what is a gather over two axes away.

        Args:
            source_spec: The sharding.
            orig_cost_dict: What was paid before.

        Returns:
            For each sharding the gather, and what is paid with it.
        """
        held = [(dim, axis) for dim, axes in enumerate(source_spec.layout.dims) for axis in axes]
        found: _Successors = {}
        for first, one in enumerate(held):
            for other in held[first + 1 :]:
                dims, axes = zip(one, other, strict=True)
                # Only the innermost axes of a dimension can be gathered.
                left = [tuple(axis for axis in each if axis not in axes) for each in source_spec.layout.dims]
                inner = all(each[: len(rest)] == rest for each, rest in zip(source_spec.layout.dims, left, strict=True))
                if inner:
                    gather = CommSpec(
                        CollectiveCommPattern.MIXGATHER_FWD_SPLIT_BWD,
                        source_spec,
                        gather_dim=list(dims),
                        logical_process_axis=list(axes),
                    )
                    spec = MeshShardingSpec(source_spec.device_mesh, source_spec.entire_shape, dict(enumerate(left)))
                    found[spec] = gather, _added(orig_cost_dict, gather.get_comm_cost())
        return found

    def get_all_one_step_transform_spec(self, source_spec: MeshShardingSpec, orig_cost_dict: Cost) -> _Successors:
        """List what is one all-gather, all-to-all or split away.

        Args:
            source_spec: The sharding.
            orig_cost_dict: What was paid before.

        Returns:
            For each sharding the collective, and what is paid with it.
        """
        return self._successors(source_spec, orig_cost_dict, *ONE_STEP)

    def mem_cost(self, comm_action_sequence: Sequence[CommSpec]) -> dict[str, int]:
        """Predict how many bytes a conversion takes at most, in addition to the tensor, for elements of 4 bytes.

        Args:
            comm_action_sequence: The collectives, as `shape_consistency` returns them.

        Returns:
            The bytes ``forward`` and ``backward``, and as ``total`` the larger number, as the passes do not overlap. Of
            what a pass makes on its way, only the last and the next tensor exist at once.

        Raises:
            PlanError: A collective was made with process groups, which do not know the shape.
        """
        sizes = [bytes_around(action) for action in comm_action_sequence]
        made = [after for _, after in sizes]
        taken = [before for before, _ in reversed(sizes)]
        forward, backward = most_at_once(made), most_at_once(taken)
        return {"forward": forward, "backward": backward, "total": max(forward, backward)}

    def shape_consistency(
        self, source_spec: MeshShardingSpec, target_spec: MeshShardingSpec
    ) -> tuple[list[MeshShardingSpec], list[CommSpec], Cost]:
        """Find a path by the documented greedy search; `apply` takes the cheapest one, which may be another.

        Args:
            source_spec: The present sharding.
            target_spec: The new sharding.

        Returns:
            The shardings on the path, the collectives between them, and what these cost together.

        Raises:
            PlanError: The shardings are not of one tensor on one mesh.
        """
        specs, actions = find_path(source_spec, target_spec)
        sequences = str(source_spec.sharding_sequence), str(target_spec.sharding_sequence)
        self.cached_spec_pairs_transform_path[sequences] = specs, actions
        return specs, actions, total_cost(actions)

    def apply(self, tensor_with_sharding_spec: torch.Tensor, target_spec: MeshShardingSpec) -> torch.Tensor:
        """Convert a tensor that has its sharding as ``sharding_spec``; gradients flow back.

        Args:
            tensor_with_sharding_spec: The local tensor.
            target_spec: The new sharding.

        Returns:
            The local tensor in the new sharding, which it has as ``sharding_spec``.

        Raises:
            PlanError: The tensor has no sharding, or one of another tensor or mesh.

        Communication: that of the cheapest path, see `colossal.tensor.plan_relayout`.
        """
        source: Any = getattr(tensor_with_sharding_spec, _ATTR, None)
        if not isinstance(source, MeshShardingSpec):
            raise PlanError(
                f"A tensor that is converted has its sharding as sharding_spec. Found {source!r}. Set it, or call "
                "apply_for_autoparallel_runtime, which takes both."
            )
        return self.apply_for_autoparallel_runtime(tensor_with_sharding_spec, source, target_spec)

    def apply_for_autoparallel_runtime(
        self, tensor: torch.Tensor, source_spec: MeshShardingSpec, target_spec: MeshShardingSpec
    ) -> torch.Tensor:
        """Convert a tensor; gradients flow back.

        Args:
            tensor: The local tensor.
            source_spec: The present sharding.
            target_spec: The new sharding.

        Returns:
            The local tensor in the new sharding, which it has as ``sharding_spec``.

        Raises:
            PlanError: The shardings are not of one tensor on one mesh.

        Communication: that of the cheapest path, see `colossal.tensor.plan_relayout`.
        """
        mesh = source_spec.device_mesh.grid.as_mesh()
        made = relayout(tensor, source_spec.layout, target_spec.layout, mesh).clone()
        setattr(made, _ATTR, target_spec)
        return made

    def _successors(self, source: MeshShardingSpec, paid: Cost, *ops: str) -> _Successors:
        return {spec: (action, _added(paid, action.get_comm_cost())) for spec, action in one_step_specs(source, *ops)}


def to_global(distributed_tensor: torch.Tensor, sharding_spec: MeshShardingSpec) -> torch.Tensor:
    """Gather a tensor that is sharded on a mesh; gradients flow back.

    Args:
        distributed_tensor: The local tensor.
        sharding_spec: Its sharding.

    Returns:
        The full tensor, which has its sharding as ``sharding_spec``: no dimension is sharded.

    Communication: that of the cheapest path, see `colossal.tensor.plan_relayout`.
    """
    full = MeshShardingSpec(sharding_spec.device_mesh, sharding_spec.entire_shape, {})
    return ShapeConsistencyManager().apply_for_autoparallel_runtime(distributed_tensor, sharding_spec, full)


def one_step_specs(source: MeshShardingSpec, *ops: str) -> Iterator[tuple[MeshShardingSpec, CommSpec]]:
    """What is one collective away, with the collective: one of ``all_gather``, ``all_to_all`` and ``shard``."""
    for step, layout in one_step_layouts(source.layout):
        if step.op in ops and _divides(layout):
            yield source.with_dims(layout), _action(source, step)


def find_path(source: MeshShardingSpec, target: MeshShardingSpec) -> tuple[list[MeshShardingSpec], list[CommSpec]]:
    """Find a path by the documented greedy search: the shardings on it, and the collectives between them."""
    path = greedy_path(source.layout, target.layout, 1)
    specs = [source.with_dims(layout) for layout in path.layouts]
    return specs, [_action(spec, step) for spec, step in zip(specs, path.steps, strict=False)]


def most_at_once(made: Sequence[int]) -> int:
    """The most bytes that exist at once, where each tensor is made from the one before, which then goes."""
    return max((last + following for last, following in zip((0, *made), made, strict=False)), default=0)


def total_cost(actions: Iterable[CommSpec]) -> Cost:
    """Add the costs of collectives up."""
    total = _FREE
    for action in actions:
        total = _added(total, action.get_comm_cost())
    return total


def _action(spec: MeshShardingSpec, step: RelayoutStep) -> CommSpec:
    return CommSpec(
        _PATTERNS[step.op],
        spec,
        gather_dim=step.source_dim,
        shard_dim=step.target_dim,
        logical_process_axis=step.axis,
    )


def _divides(layout: Layout) -> bool:
    """Whether every dimension divides by its number of shards."""
    sizes = (torch.Size(layout.grid[axis] for axis in axes).numel() for axes in layout.dims)
    return all(length % size == 0 for length, size in zip(layout.shape, sizes, strict=True))


def _added(one: Cost, other: Cost) -> Cost:
    return {name: one.get(name, 0.0) + seconds for name, seconds in other.items()}
