"""One parameter in one step: its values, gradient and state on this rank, in the precision to compute in."""

from abc import abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, final

import torch

from colossal._src.nn.optimizer.checked_optimizer import CheckedOptimizer, state_dtype
from colossal._src.nn.optimizer.factored import SumRequests, run_with_batched_sums
from colossal._src.tensor import Placement, copy_placement, is_dtensor, layout_of, local_of, placement_of
from colossal.errors import UnsupportedError


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
