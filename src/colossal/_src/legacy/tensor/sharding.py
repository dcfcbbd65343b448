"""What a distributed tensor is, and the conversions that operators make of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch

from colossal._src.legacy.tensor.process_group import ProcessGroup
from colossal._src.legacy.tensor.specs import ComputeSpec, ReplicaSpec, layout_for, sharded_dim
from colossal._src.tensor import Layout, relayout

_ATTR = "_colo_sharding"


@final
@dataclass(frozen=True)
class TensorSharding:
    """The group and the layout of a tensor, and how operators use it."""

    group: ProcessGroup
    layout: Layout  # over the tp axis
    compute: ComputeSpec | None = None

    @property
    def dim(self) -> int | None:
        """The dimension that is sharded; None if this rank has the full tensor."""
        return sharded_dim(self.layout)

    def over(self, shape: Sequence[int], dim: int | None) -> Self:
        """Return the sharding of another tensor of the group, along a dimension or none."""
        layout = layout_for(ReplicaSpec(), shape, self.group)
        if dim is not None:
            layout = replace(layout, dims=tuple((0,) if at == dim else () for at in range(len(shape))))
        return type(self)(self.group, layout)


def sharding_of(value: object) -> TensorSharding | None:
    """Return the sharding of a tensor; None for a plain one, which is the same on all ranks."""
    return getattr(value, _ATTR, None)


def set_sharding(tensor: torch.Tensor, sharding: TensorSharding) -> None:
    """Remember how a tensor is distributed."""
    setattr(tensor, _ATTR, sharding)


@final
class OperatorCall:
    """One operation of torch on tensors of which some are distributed."""

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any],
        wrap: Callable[[torch.Tensor, TensorSharding], torch.Tensor],
    ) -> None:
        self.func, self.args, self.kwargs = func, tuple(args), dict(kwargs)
        self._run, self._wrap = run, wrap
        self.known = [found for value in tensors_in((args, kwargs)) if (found := sharding_of(value)) is not None]

    @property
    def sharded(self) -> TensorSharding | None:
        """The sharding of the first argument that is sharded; None if no argument is."""
        return next((each for each in self.known if each.dim is not None), None)

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation on local values."""
        return self._run(func, args, kwargs)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the local values of a tensor, as a plain one through which gradients flow."""
        if sharding_of(tensor) is None:
            return tensor
        return self.run(torch.Tensor.view, tensor, tuple(tensor.shape))

    def converted(self, tensor: torch.Tensor, dim: int | None, sharding: TensorSharding) -> torch.Tensor:
        """Return the local values of a tensor after it was sharded along a dimension, or gathered for None."""
        known = sharding_of(tensor) or sharding.over(tensor.shape, None)
        if known.dim == dim:
            return self.local(tensor)
        target = known.over(known.layout.shape, dim)
        return relayout(self.local(tensor), known.layout, target.layout, known.group.mesh)

    def wrap(self, local: torch.Tensor, shape: Sequence[int], dim: int | None, like: TensorSharding) -> torch.Tensor:
        """Make a distributed tensor of local values."""
        return self._wrap(local, like.over(shape, dim))

    def wrap_as(self, local: torch.Tensor, like: TensorSharding) -> torch.Tensor:
        """Make a distributed tensor of local values that are arranged as those of another one."""
        return self._wrap(local, replace(like, compute=None))

    def wrap_full(self, value: Any, like: TensorSharding) -> Any:
        """Make replicated tensors of what an operation returned, which may be nested; its own arguments stay."""
        if isinstance(value, torch.Tensor):
            is_argument = any(value is each for each in tensors_in((self.args, self.kwargs)))
            return value if is_argument else self._wrap(value, like.over(value.shape, None))
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            items: Any = [self.wrap_full(item, like) for item in value]
            if hasattr(value, "_fields"):
                return type(value)(*items)
            return type(value)(items)
        return value

    def map_args(self, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with each tensor that is distributed, or that `change` also takes, replaced."""
        return map_tensors(self.args, change), map_tensors(self.kwargs, change)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors of nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors of nested arguments."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items: Any = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
