"""One parameter in one step: its values, gradient and state on this rank, in the precision to compute in."""

from abc import abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.comm import equal_on_all_ranks, int64_digest
from colossal._src.nn.optimizer.checked_optimizer import CheckedOptimizer, state_dtype
from colossal._src.nn.optimizer.factored import SumRequests, run_with_batched_sums
from colossal._src.tensor import (
    FlatLayout,
    Placement,
    copy_placement,
    is_dtensor,
    layout_of,
    local_of,
    placement_of,
    set_placement,
)
from colossal.errors import ConfigError, ShapeError, UnsupportedError


@final
class ParamShard:
    """The local shard of a parameter during an update."""

    def __init__(
        self,
        param: torch.Tensor,
        group: dict[str, Any],
        state: MutableMapping[str, Any],
        placement: Placement | None = None,
        index: int = 0,
    ) -> None:
        assert param.grad is not None
        self.placement = _placement_of(param) if placement is None else placement
        self.group, self.index = group, index
        self._param, self._state, self._dtype = param, state, state_dtype(param)
        self._own = self._without_padding(param)
        self.grad = self._without_padding(param.grad).to(self._dtype)
        state["step"] = state.get("step", torch.tensor(0.0, device="cpu")) + 1
        self.step = int(state["step"])

    @property
    def is_matrix(self) -> bool:
        """Whether the full parameter has rows and columns, which are its last two dimensions."""
        return len(self.placement.shape) > 1

    @property
    def values(self) -> torch.Tensor:
        """The values, in the precision of the state; in memory of their own if that is another one."""
        return self._own.to(self._dtype)

    def sharded_state(self, name: str) -> torch.Tensor:
        """Return a state with one value for each local element; zeros at first."""
        if name not in self._state:
            is_padded = self._own.numel() != local_of(self._param).numel()
            like = self._own if is_padded else self._param.detach()
            self._state[name] = copy_placement(torch.zeros_like(like, dtype=self._dtype), self._param)
        elif self._upcast_state(name):
            self._state[name] = copy_placement(self._state[name], self._param)
        return self._without_padding(self._state[name])

    def replicated_state(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a state that is replicated on all ranks; zeros at first."""
        if name not in self._state:
            self._state[name] = torch.zeros(tuple(shape), dtype=self._dtype, device=self._own.device)
        self._upcast_state(name)
        return self._state[name]

    def subtract(self, update: torch.Tensor) -> None:
        """Subtract an update from the values."""
        self._own.sub_(update)

    def _upcast_state(self, name: str) -> bool:
        """Undo a cast of a state, such as torch's; return whether it was cast."""
        narrow = self._state[name]
        self._state[name] = narrow.to(self._dtype)
        return self._state[name] is not narrow

    def _without_padding(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of the placement, which share memory with a tensor that may be padded at its end."""
        local, length = local_of(tensor.detach()), prod(self.placement.local_shape)
        return local if local.numel() == length else local.reshape(-1)[:length]


def _placement_of(param: torch.Tensor) -> Placement:
    """The placement of a parameter, which must also be that of its gradient."""
    if is_dtensor(param) and param.grad is not None and layout_of(param.grad) != layout_of(param):
        raise UnsupportedError(
            f"The gradient of a DTensor is placed as the parameter is. Found {layout_of(param.grad)} for "
            f"{layout_of(param)}. Redistribute it before the step."
        )
    return placement_of(param)


class ShardAwareOptimizer(CheckedOptimizer):
    """Updates each parameter by an algorithm that is written for one, and runs as if each rank had all of it.

    Parameters may be full, or sharded in any way that `colossal.tensor.placement_of` knows. All ranks must have
    gradients of the same parameters, those too of which a rank has no elements. While sums travel, the updates of all
    parameters that are sharded wait for them, which takes memory for as many numbers as this rank has of them.

    Args:
        params: Parameters, named parameters, or parameter groups.
        defaults: The hyperparameters of groups that do not have their own.

    Communication: all_reduce, the axes that shard the parameters; as the optimizer says.
    """

    _placements: Mapping[torch.Tensor, Placement] = MappingProxyType({})
    """Of parameters that are padded, which their own placements do not say."""

    def _update(self) -> None:
        pairs = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        self._update_shards(
            [
                ParamShard(param, group, self.state[param], self._placements.get(param), index)
                for index, (param, group) in enumerate(pairs)
            ]
        )

    def _update_shards(self, shards: list[ParamShard]) -> None:
        run_with_batched_sums((shard.placement, self._update_shard(shard)) for shard in shards)

    @abstractmethod
    def _update_shard(self, shard: ParamShard) -> SumRequests:
        """Update a parameter: yield local sums, and go on with those of all ranks."""


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Add the squares of all elements up."""
    return torch.linalg.vector_norm(tensor).square()


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
        layout. Next to such parameters, plain ones are full, and the same on all ranks of `tp_group`. Without this
        call, parameters have the placement that `colossal.tensor.placement_of` returns.

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
            UnsupportedError: There is a tp_group, and no parameter has a placement, or one that has none differs
                among its ranks; or a working parameter is a range.

        Communication: with a tp_group, all_reduce, 16 bytes for each parameter that has no placement.
        """
        self.is_zero = is_zero if use_zero is None else use_zero
        params: list[torch.Tensor] = [param for group in self.param_groups for param in group["params"]]
        works_of, paddings = _by_id(shard_to_working_param), _by_id(padding_map or _NOTHING)
        works = [works_of.get(id(param), param) for param in params]
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            _check_tensor_parallel(works, tp_group)
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


def _check_tensor_parallel(works: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Take parameters without a placement as full next to others that have one, and if all ranks have the same."""
    plain = [work for work in works if not placement_of(work).groups]
    if plain and len(plain) == len(works):
        raise UnsupportedError(
            "With a tp_group, each parameter says how it is sharded. Found a plain tensor of the shape "
            f"{tuple(plain[0].shape)}, which may be full or a shard. Make it a DTensor (torch.distributed.tensor has "
            "distribute_tensor and DTensor.from_local), or use the layers of colossal.nn."
        )
    equal = equal_on_all_ranks([int64_digest(str(tuple(work.shape)), work) for work in plain], [group])
    if not all(equal):
        raise UnsupportedError(
            "Next to parameters that say how they are sharded, a plain tensor is full, and the same on all ranks of "
            f"tp_group. Found one of the shape {tuple(plain[equal.index(False)].shape)} that differs. If it is a "
            "shard, make it a DTensor (DTensor.from_local of torch.distributed.tensor); else set one seed on all ranks."
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
