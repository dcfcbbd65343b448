"""Conversions between layouts of tensors on a `DeviceMesh`: what is one collective away, paths, costs."""

from dataclasses import dataclass
from typing import final

import torch

from colossal._src.legacy.notice import superseded
from colossal._src.legacy.tensor.d_tensor import convert
from colossal._src.legacy.tensor.d_tensor_layout import DTensorLayout, ShardingSpec
from colossal._src.legacy.tensor.mesh_sharding import CommSpec, MeshShardingSpec
from colossal._src.legacy.tensor.shape_consistency import ONE_STEP, Cost, find_path, one_step_specs, total_cost
from colossal.errors import ConfigError


@final
@dataclass
class LayoutConverterOptions:
    """Options of conversions between layouts: there are none, and were none."""


def set_layout_converting_options(options: LayoutConverterOptions | None) -> None:
    """Say that there is nothing to set: conversions take the cheapest path.

    Args:
        options: A `LayoutConverterOptions`, or None.

    Raises:
        ConfigError: It is something else.
    """
    superseded("set_layout_converting_options", "colossal.tensor.relayout, which has nothing to set")
    if options is not None and not isinstance(options, LayoutConverterOptions):
        raise ConfigError(
            f"Conversions of layouts have no options to set. Found {options!r}. Pass LayoutConverterOptions()."
        )


@final
class LayoutConverter:
    """Converts tensors between layouts.

    Superseded by `colossal.tensor.plan_relayout` and `colossal.tensor.relayout`.

    Attributes:
        cached_solution: The path and the collectives of the last call of `layout_converting` for each pair of sharding
            sequences, as text.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import DTensorLayout, LayoutConverter, ShardingSpec
        >>> from colossal.legacy.device import DeviceMesh
        >>> mesh = DeviceMesh(torch.arange(4), (2, 2))
        >>> specs = [ShardingSpec(3, {0: [0, 1]}), ShardingSpec(3, {1: [0, 1]})]
        >>> source, target = (DTensorLayout(mesh, spec, (8, 8, 8)) for spec in specs)
        >>> path, actions = LayoutConverter().layout_converting(source, target)
        >>> [layout.sharding_spec.sharding_sequence for layout in path]
        [[S01, R, R], [S0, R, R], [R, S0, R], [R, S01, R]]
        >>> actions[0]
        CommSpec:(comm_pattern:GATHER_FWD_SPLIT_BWD, gather_dim:0, logical_process_axis:1)
    """

    def __init__(self) -> None:
        self.cached_solution: dict[tuple[str, str], tuple[list[DTensorLayout], list[CommSpec]]] = {}

    def all_gather_transform_layouts(self, source_layout: DTensorLayout) -> dict[DTensorLayout, CommSpec]:
        """List what is one all-gather away.

        Args:
            source_layout: The layout.

        Returns:
            For each layout the collective.
        """
        return _one_step(source_layout, "all_gather")

    def all_to_all_transform_layout(self, source_layout: DTensorLayout) -> dict[DTensorLayout, CommSpec]:
        """List what is one all-to-all away.

        Args:
            source_layout: The layout.

        Returns:
            For each layout the collective.
        """
        return _one_step(source_layout, "all_to_all")

    def shard_transform_layout(self, source_layout: DTensorLayout) -> dict[DTensorLayout, CommSpec]:
        """List what is one split away.

        Args:
            source_layout: The layout.

        Returns:
            For each layout the split.
        """
        return _one_step(source_layout, "shard")

    def get_all_one_step_transform_spec(self, source_layout: DTensorLayout) -> dict[DTensorLayout, CommSpec]:
        """List what is one all-gather, all-to-all or split away.

        Args:
            source_layout: The layout.

        Returns:
            For each layout the collective.
        """
        return _one_step(source_layout, *ONE_STEP)

    def layout_converting(
        self, source_layout: DTensorLayout, target_layout: DTensorLayout
    ) -> tuple[list[DTensorLayout], list[CommSpec]]:
        """Find a path by the documented greedy search; `apply` takes the cheapest one, which may be another.

        Args:
            source_layout: The present layout.
            target_layout: The new layout.

        Returns:
            The layouts on the path, and the collectives between them.

        Raises:
            PlanError: The layouts are not of one tensor on one mesh.
        """
        specs, actions = find_path(_spec_of(source_layout), _spec_of(target_layout))
        path = [*map(_layout_of, specs)]
        sequences = (
            str(source_layout.sharding_spec.sharding_sequence),
            str(target_layout.sharding_spec.sharding_sequence),
        )
        self.cached_solution[sequences] = path, actions
        return path, actions

    def get_total_comm_cost(self, source_layout: DTensorLayout, target_layout: DTensorLayout) -> Cost:
        """Predict what the path of `layout_converting` costs by the costs of the mesh, for elements of 4 bytes.

        Args:
            source_layout: The present layout.
            target_layout: The new layout.

        Returns:
            The seconds ``forward``, ``backward`` and in ``total``.

        Raises:
            PlanError: The layouts are not of one tensor on one mesh.
        """
        return total_cost(self.layout_converting(source_layout, target_layout)[1])

    def apply(self, tensor: torch.Tensor, source_layout: DTensorLayout, target_layout: DTensorLayout) -> torch.Tensor:
        """Convert what this rank holds; gradients flow back.

        Args:
            tensor: The local tensor.
            source_layout: The present layout.
            target_layout: The new layout.

        Returns:
            The local tensor in the new layout.

        Raises:
            PlanError: The layouts are not of one tensor on one mesh.

        Communication: that of the cheapest path, see `colossal.tensor.plan_relayout`; backward, what leads back.
        """
        return convert(tensor, source_layout, target_layout)


def _one_step(source: DTensorLayout, *ops: str) -> dict[DTensorLayout, CommSpec]:
    return {_layout_of(spec): action for spec, action in one_step_specs(_spec_of(source), *ops)}


def _spec_of(layout: DTensorLayout) -> MeshShardingSpec:
    return MeshShardingSpec(layout.device_mesh, layout.global_shape, layout.sharding_spec.dim_partition_dict)


def _layout_of(spec: MeshShardingSpec) -> DTensorLayout:
    sharding = ShardingSpec(len(spec.entire_shape), spec.dim_partition_dict)
    return DTensorLayout(spec.device_mesh, sharding, spec.entire_shape)
