# pyright: reportUnknownMemberType=false
"""Parameters that know how they are distributed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast, final

import torch
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.legacy.tensor.colo_tensor import ColoTensor, wrap_local
from colossal._src.legacy.tensor.dispatch import run_operation
from colossal._src.legacy.tensor.process_group import ProcessGroup
from colossal._src.legacy.tensor.sharding import TensorSharding, sharding_of
from colossal._src.legacy.tensor.specs import ColoTensorSpec, DistSpec
from colossal._src.tensor import Placement, RunLocal, local_operations, set_operators, set_placement
from colossal.accelerator import get_current_device


class ColoParameter(ColoTensor, nn.Parameter):
    """A parameter that is a `ColoTensor`: modules list it, and optimizers update this rank's shard of it.

    Norms, checkpoints, ZeRO and Gemini know from its placement which elements it has.

    Superseded by `colossal.shardformer.ShardFormer` and the layers of `colossal.nn`.

    Example:
        >>> import torch
        >>> from colossal.legacy.tensor import ColoParameter
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     parameter = ColoParameter(torch.ones(2))
        >>> isinstance(parameter, torch.nn.Parameter), parameter.is_replicate()
        (True, True)
    """

    def __new__(
        cls, data: torch.Tensor | None = None, requires_grad: bool = True, spec: ColoTensorSpec | None = None
    ) -> Self:
        """Make a parameter of local values.

        Args:
            data: The local values; none by default.
            requires_grad: Whether it is trained.
            spec: How it is distributed; by default replicated on all ranks.

        Returns:
            The parameter, which shares their memory.
        """
        values = torch.empty(0, device=get_current_device()) if data is None else data
        made: Self = torch.Tensor._make_subclass(cls, values.detach(), requires_grad)  # noqa: SLF001 (as nn.Parameter)
        return made._distribute(spec)

    @staticmethod
    def from_torch_tensor(  # pyright: ignore[reportIncompatibleMethodOverride] (as documented)
        tensor: torch.Tensor, requires_grad: bool = True, spec: ColoTensorSpec | None = None
    ) -> "ColoParameter":
        """Make a distributed parameter of what this rank holds.

        Args:
            tensor: The local values.
            requires_grad: Whether it is trained.
            spec: How it is distributed; by default replicated on all ranks.

        Returns:
            The parameter.
        """
        make: Any = ColoParameter  # whose metaclass is that of nn.Parameter
        return make(tensor, requires_grad, spec)

    def _replicate_over(self, group: ProcessGroup) -> None:
        self._distribute(ColoTensorSpec(group))

    def _set_sharding(self, sharding: TensorSharding) -> None:
        super()._set_sharding(sharding)
        mesh, is_sharded = sharding.group.mesh, sharding_of(self) is not None and sharding.dim is not None
        shards = (mesh.group("tp"),) if is_sharded else ()
        replicas = tuple(
            mesh.group(axis) for axis in ("dp", "tp") if mesh.size(axis) > 1 and not (is_sharded and axis == "tp")
        )
        layout = sharding.layout if is_sharded else replace(sharding.layout, dims=())
        set_operators(self, _ParameterOperators(mesh))
        with local_operations():
            set_placement(self, Placement(layout, mesh.global_rank, shards, replicas))


@final
class _ParameterOperators:
    """Runs operations for a parameter whose values another owner keeps, as Gemini does."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: RunLocal) -> Any:
        """Run an operation; `run` does so on local values."""
        return run_operation(func, args, kwargs, run, wrap_local)


def convert_to_colo_parameter(
    parameter: nn.Parameter, group: ProcessGroup | None, dist_spec: DistSpec | None = None
) -> None:
    """Turn a parameter, whose object stays, into a distributed one, and shard it."""
    parameter.__class__ = ColoParameter  # in place: tied layers and optimizers refer to this object
    made = cast("ColoParameter", parameter)
    made._replicate_over(group or ProcessGroup())  # noqa: SLF001 (of this module)
    if dist_spec is not None:
        made.set_dist_spec(dist_spec)
