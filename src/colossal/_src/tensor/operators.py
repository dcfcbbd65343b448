"""Parameters with operators of their own: what an operation of torch means for a local shard."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from colossal._src.cluster import ParallelMesh
from colossal._src.tensor.introspection import ShardedGradient
from colossal._src.tensor.placement import Placement, local_operations, set_placement
from colossal.errors import ConfigError

_ATTR = "_colossal_operators"

RunLocal = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Runs an operation of torch on the values that this rank has of its arguments."""


class TensorOperators(Protocol):
    """Runs the operations that read a parameter, of which each rank may hold a shard."""

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh over whose axes the parameter is sharded."""
        ...

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: RunLocal) -> Any:
        """Run an operation; `run` does so on local values, however these are kept."""
        ...


def set_operators(parameter: torch.Tensor, operators: TensorOperators) -> None:
    """Let a parameter run its operations by `operators`, also where another owner keeps its values."""
    setattr(parameter, _ATTR, operators)


def operators_of(parameter: object) -> TensorOperators | None:
    """Return what runs the operations of a parameter; None for one of plain torch."""
    return getattr(parameter, _ATTR, None)


def operators_mesh(parameters: Iterable[torch.Tensor]) -> ParallelMesh | None:
    """Return the mesh of parameters with operators of their own; None if there are none."""
    found = {id(own.mesh): own.mesh for each in parameters if (own := operators_of(each)) is not None}
    if len(found) > 1:
        raise ConfigError(
            f"The parameters of a model are distributed over one mesh. Found {list(found.values())}. Give all of them "
            "the same process group."
        )
    return next(iter(found.values()), None)


def sharded_gradient(grad: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Look at the gradient of a shard, sharing its memory, as one whose norm is that of the full gradient."""
    with local_operations():
        return set_placement(grad.as_subclass(ShardedGradient), placement)
