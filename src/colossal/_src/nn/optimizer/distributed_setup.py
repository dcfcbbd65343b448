"""Describes to an optimizer which shards of which parameters it holds."""

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed as dist

from colossal._src.nn.optimizer.param_shard import ShardAwareOptimizer
from colossal._src.tensor import FlatLayout, Placement, placement_of, set_placement
from colossal.errors import ConfigError, ShapeError, UnsupportedError

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class SetupDistributedMixin(ShardAwareOptimizer):
    """Adds to an optimizer the method that describes how its parameters are sharded.

    Attributes:
        is_zero: Whether parameters are shards of what the model works with.
    """

    is_zero = False

    def setup_distributed(
        self,
        tp_group: dist.ProcessGroup | None = None,
        dp_group: dist.ProcessGroup | None = None,
        shard_to_working_param: Mapping[Any, torch.Tensor] = _NOTHING,
        padding_map: Mapping[Any, int] | None = None,
        is_zero: bool = False,
        use_zero: bool | None = None,
    ) -> None:
        """Describe how the parameters are sharded; before the first step.

        Under ZeRO, rank r of `dp_group` holds the r-th of equal chunks of each flattened and padded working parameter.
        A parameter that tensor parallelism shards belongs to a layer of colossal.nn or is a DTensor; both know their
        layout. Without this call, parameters have the placement that `colossal.tensor.placement_of` returns.

        Args:
            tp_group: The tensor-parallel group.
            dp_group: The group over which ZeRO partitions the state.
            shard_to_working_param: The working parameter of each parameter of this optimizer, or of its `id`.
            padding_map: How many elements pad a working parameter, by this or by its `id`; by default as many as the
                chunks have room for.
            is_zero: Whether the parameters are such chunks.
            use_zero: Another name of `is_zero`.

        Raises:
            ConfigError: ZeRO needs a group, or a working parameter is missing.
            ShapeError: A chunk is not of the size that it must have.
            UnsupportedError: There is a tp_group, and a parameter has no placement; or a working parameter is
                a range.
        """
        self.is_zero = is_zero if use_zero is None else use_zero
        params: list[torch.Tensor] = [param for group in self.param_groups for param in group["params"]]
        works_of, paddings = _by_id(shard_to_working_param), _by_id(padding_map or _NOTHING)
        works = [works_of.get(id(param), param) for param in params]
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            for work in works:
                _check_tensor_parallel(work)
        if not self.is_zero:
            return
        if dp_group is None or any(work is param for work, param in zip(works, params, strict=True)):
            raise ConfigError(
                "Under ZeRO, dp_group and the working parameter of each shard say what a shard is. Found "
                f"dp_group={dp_group} and {len(shard_to_working_param)} working parameters for {len(params)} shards. "
                "Pass both, or is_zero=False."
            )
        self._placements = {}
        for param, work in zip(params, works, strict=True):
            padding = paddings.get(id(work), paddings.get(id(param)))
            placement = _placement(param, work, dp_group, padding)
            if tuple(param.shape) == placement.local_shape:
                set_placement(param, placement)
            else:  # padded
                self._placements[param] = placement


def _by_id(table: Mapping[Any, Any]) -> dict[int, Any]:
    return {id(key) if isinstance(key, torch.Tensor) else key: value for key, value in table.items()}


def _check_tensor_parallel(work: torch.Tensor) -> None:
    if not placement_of(work).groups:
        raise UnsupportedError(
            "With a tp_group, each parameter says how it is sharded. Found a plain tensor of the shape "
            f"{tuple(work.shape)}, which may be full or a shard. Make it a DTensor (torch.distributed.tensor has "
            "distribute_tensor and DTensor.from_local), or use the layers of colossal.nn."
        )


def _placement(param: torch.Tensor, work: torch.Tensor, group: dist.ProcessGroup, padding: int | None) -> Placement:
    """Where the elements of a chunk are."""
    full = placement_of(work)
    if full.flat is not None:
        raise UnsupportedError(
            "Chunks are of a working parameter that is full, or a shard of tensor parallelism. Found one that is a "
            f"range itself, of the full shape {full.shape}. Pass the parameter of the model."
        )
    size, numel = dist.get_world_size(group), prod(full.local_shape)
    room = param.numel() * size - numel
    if room < 0 or padding not in (None, room):
        raise ShapeError(
            f"The chunks of a working parameter have its {numel} elements and the padding. Found {size} of "
            f"{param.numel()}, and padding_map says {padding}. Pass chunks of {-(-numel // size)} "
            "elements or more, and padding_map=None."
        )
    ends = [min(numel, i * param.numel()) for i in range(size + 1)]
    flat = FlatLayout(full.local_shape, tuple(dist.get_process_group_ranks(group)), tuple(pairwise(ends)))
    return full.flattened(flat, group, work.device.type)
