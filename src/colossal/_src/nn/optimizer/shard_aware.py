"""Optimizers that need sums over full parameters, of which a rank may hold a shard."""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import torch

from colossal._src.nn.optimizer.base import CheckedOptimizer
from colossal._src.nn.optimizer.batched_sums import SumRequests, run_with_batched_sums
from colossal._src.nn.optimizer.param_shard import ParamShard
from colossal._src.tensor import Placement


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
