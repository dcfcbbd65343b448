# pyright: reportUnknownMemberType=false
"""Tensors that know how they are distributed, and run operations accordingly."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from colossal._src.legacy.tensor.backward import BACKWARD_PASSES, run_backward
from colossal._src.legacy.tensor.dispatch import run_operation
from colossal._src.legacy.tensor.process_group import ProcessGroup
from colossal._src.legacy.tensor.sharding import TensorSharding, set_sharding, sharding_of
from colossal._src.legacy.tensor.specs import (
    ColoTensorSpec,
    ComputeSpec,
    DistSpec,
    ReplicaSpec,
    layout_for,
    spec_of,
)
from colossal._src.tensor import local_operations, relayout, set_data
from colossal.errors import MeshError, UnsupportedError


class ColoTensor(torch.Tensor):
    """A tensor of which each tensor-parallel rank holds a shard, or a replica.

    Operations of torch take it: products, lookups and losses compute with shards, elementwise operations keep them,
    and others gather them first. `shape` is that of the local tensor, `size()` that of the full one.

    Superseded by the layers of `colossal.nn`, `colossal.shardformer.ShardFormer`, and `colossal.tensor.relayout`.

    Attributes:
        is_local_view: True: `shape` and `data` are those of this rank.

    Raises:
        PlanError: The spec does not fit the tensor or its group.

    Example:
        >>> import torch
        >>> from colossal.legacy.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ShardSpec
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     group = ProcessGroup(tp_degree=2)
        ...     shard = torch.full((2, 1), float(group.tp_local_rank()))
        ...     tensor = ColoTensor.from_torch_tensor(shard, ColoTensorSpec(group, ShardSpec([-1], [2])))
        ...     return tensor.to_replicate().tolist(), tensor.shape, tensor.size_global()
        >>> run_threads(program, 2)[0]
        ([[0.0, 1.0], [0.0, 1.0]], torch.Size([2, 1]), torch.Size([2, 2]))
    """

    is_local_view = True

    def __new__(cls, data: torch.Tensor, spec: ColoTensorSpec | None = None) -> Self:
        """Look at local values as a distributed tensor; one of a leaf of autograd is a leaf, and gets gradients itself.

        Args:
            data: The local values.
            spec: How they are distributed; by default replicated on all ranks.

        Returns:
            The distributed tensor, which shares their memory.
        """
        with local_operations():
            made: Any = (data.detach() if data.is_leaf else data).as_subclass(cls)
            if data.is_leaf:
                made.requires_grad_(data.requires_grad)
        return made._distribute(spec)  # noqa: SLF001 (of this class)

    @classmethod
    def _of(cls, data: torch.Tensor, spec: ColoTensorSpec | None) -> Self:
        """Look at local values, to which gradients flow."""
        with local_operations():
            made = data.as_subclass(cls)
        return made._distribute(spec)  # noqa: SLF001 (of this class)

    @staticmethod
    def from_torch_tensor(tensor: torch.Tensor, spec: ColoTensorSpec | None = None) -> "ColoTensor":
        """Make a distributed tensor of what this rank holds; gradients flow to it.

        Args:
            tensor: The local tensor.
            spec: How it is distributed; by default replicated on all ranks.

        Returns:
            The distributed tensor, which shares the memory of the local one.
        """
        return ColoTensor._of(tensor, spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch as layouts require."""
        known = (torch.Tensor, nn.Parameter)
        if any(kind not in known and not issubclass(kind, ColoTensor) and _runs_operations(kind) for kind in types):
            return NotImplemented
        if func in BACKWARD_PASSES:
            return run_backward(func, args, kwargs or {}, ColoTensor)
        with local_operations():
            return run_operation(func, args, kwargs or {}, _run_local, wrap_local)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe the local values, without communication."""
        with local_operations():
            text = torch.Tensor.__repr__(self.detach().as_subclass(torch.Tensor), tensor_contents=tensor_contents)
        return f"{type(self).__name__}({text}, {self.dist_spec}, {self.process_group})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the local values, with the same spec."""
        if id(self) not in memo:
            with local_operations():
                made: Any = self.detach().clone().as_subclass(type(self)).requires_grad_(self.requires_grad)
            sharding = replace(self._sharding, compute=deepcopy(self.compute_spec))
            made._set_sharding(sharding)  # noqa: SLF001 (of this class)
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        """Save a replicated tensor as a plain one; a shard alone would be read as the full tensor."""
        if self._sharding.dim is not None:
            raise UnsupportedError(
                f"A file holds full tensors. Found a shard, {self.dist_spec}. Save to_replicate() of it, or the model "
                "with Booster.save_model."
            )
        with local_operations():
            return self.detach().as_subclass(torch.Tensor).__reduce_ex__(proto)

    # ---------------------------------------------------------------------------------- what it is

    @property
    def process_group(self) -> ProcessGroup:
        """Its ranks."""
        return self._sharding.group

    @property
    def dist_spec(self) -> DistSpec:
        """How the tensor-parallel ranks hold it."""
        return spec_of(self._sharding.layout)

    @property
    def compute_spec(self) -> ComputeSpec | None:
        """How operators use it."""
        return self._sharding.compute

    @compute_spec.setter
    def compute_spec(self, value: ComputeSpec | None) -> None:
        self._set_sharding(replace(self._sharding, compute=value))

    @property
    def tensor_spec(self) -> ColoTensorSpec:
        """All of what it knows in addition to its values."""
        return ColoTensorSpec(self.process_group, self.dist_spec, self.compute_spec)

    def has_compute_spec(self) -> bool:
        """Return whether it says how operators use it.

        Returns:
            True if it does.
        """
        return self.compute_spec is not None

    def is_model_data(self) -> bool:
        """Return whether it is a parameter.

        Returns:
            True if it is.
        """
        return isinstance(self, nn.Parameter)

    def is_replicate(self) -> bool:
        """Return whether each tensor-parallel rank holds the full tensor.

        Returns:
            True if each does.
        """
        return self._sharding.dim is None

    def is_sharded(self) -> bool:
        """Return whether each tensor-parallel rank holds a shard; a single one holds all of it.

        Returns:
            True if each does.
        """
        return any(self._sharding.layout.dims)

    def is_shard_1dcol(self) -> bool:
        """Return whether its last dimension is sharded.

        Returns:
            True if it is.
        """
        return self._sharding.dim == len(self._sharding.layout.shape) - 1

    def is_shard_1drow(self) -> bool:
        """Return whether its first dimension is sharded.

        Returns:
            True if it is.
        """
        return self._sharding.dim == 0

    def get_process_group(self) -> ProcessGroup:
        """Return its ranks.

        Returns:
            Their group.
        """
        return self.process_group

    def get_tp_world_size(self) -> int:
        """Return over how many ranks it may be sharded.

        Returns:
            The number of ranks.
        """
        return self.process_group.tp_world_size()

    def get_dp_world_size(self) -> int:
        """Return how many data-parallel replicas of it there are.

        Returns:
            The number of replicas.
        """
        return self.process_group.dp_world_size()

    def size_global(self, dim: int | None = None) -> Any:
        """Return the size of the full tensor.

        Args:
            dim: One of its dimensions; all by default.

        Returns:
            The full shape, or the length of the dimension.
        """
        full = torch.Size(self._sharding.layout.shape)
        return full if dim is None else full[dim]

    def numel_global(self) -> int:
        """Return the number of elements of the full tensor.

        Returns:
            The number.
        """
        return self.size_global().numel()

    # ---------------------------------------------------------------------------------- conversions

    def redistribute(self, dist_spec: DistSpec, pg: ProcessGroup | None = None) -> "ColoTensor":
        """Convert it to another spec; gradients flow back in the present one.

        Args:
            dist_spec: The new spec.
            pg: Its ranks from then on; the same by default.

        Returns:
            A new tensor.

        Raises:
            PlanError: The spec does not fit the tensor or its group.

        Communication: what `colossal.tensor.relayout` sends; backward, what leads back.
        """
        old = self._sharding
        if pg is not None and pg != old.group:
            replicated = self.to_replicate()
            with local_operations():
                plain = replicated.as_subclass(torch.Tensor)
            return ColoTensor._of(plain, ColoTensorSpec(pg, compute_attr=old.compute)).redistribute(dist_spec)
        layout = layout_for(dist_spec, old.layout.shape, old.group)
        with local_operations():
            local = relayout(self.as_subclass(torch.Tensor), old.layout, layout, old.group.mesh)
            return wrap_local(local, replace(old, layout=layout))

    def to_replicate(self) -> "ColoTensor":
        """Gather it on all tensor-parallel ranks; gradients flow back to the shards.

        Returns:
            A new tensor.

        Communication: all_gather, tp, the full tensor's bytes; none backward.
        """
        return self.redistribute(ReplicaSpec())

    def to_replicate_(self) -> Self:
        """Gather it on all tensor-parallel ranks, in place.

        Returns:
            This tensor.

        Communication: as of `to_replicate`.
        """
        self.set_dist_spec(ReplicaSpec())
        return self

    def set_dist_spec(self, dist_spec: DistSpec) -> None:
        """Convert it to another spec, in place; gradients flow back through the conversion of an activation.

        Args:
            dist_spec: The new spec.

        Raises:
            PlanError: The spec does not fit the tensor or its group.

        Communication: as of `redistribute`.
        """
        old = self._sharding
        layout = layout_for(dist_spec, old.layout.shape, old.group)
        if layout == old.layout:
            return
        with local_operations():
            if self.grad_fn is not None:
                converted = relayout(self.as_subclass(torch.Tensor).view_as(self), old.layout, layout, old.group.mesh)
                # Its object stays, with the values and the graph of the conversion.
                torch._C._swap_tensor_impl(self, converted)  # noqa: SLF001 (no public name keeps the attributes)
            else:
                with torch.no_grad():
                    grad, self.grad = self.grad, None
                    set_data(self, relayout(self.as_subclass(torch.Tensor), old.layout, layout, old.group.mesh))
                    self.grad = None if grad is None else relayout(grad, old.layout, layout, old.group.mesh)
        self._set_sharding(replace(old, layout=layout))

    def set_process_group(self, pg: ProcessGroup) -> None:
        """Choose its ranks, before it is sharded.

        Args:
            pg: The ranks.

        Raises:
            MeshError: It is sharded over other ranks.
        """
        old = self._sharding
        if pg == old.group:
            return
        if old.dim is not None:
            raise MeshError(
                f"A tensor changes its ranks while it is replicated. Found {self.dist_spec} over {old.group}. Call "
                "to_replicate_() first."
            )
        self._set_sharding(replace(old, group=pg, layout=layout_for(ReplicaSpec(), old.layout.shape, pg)))

    def set_tensor_spec(self, dist_spec: DistSpec | None, compute_spec: ComputeSpec | None) -> None:
        """Convert it to another spec, in place, and say how operators use it.

        Args:
            dist_spec: The new spec; None keeps the present one.
            compute_spec: How operators use it.

        Raises:
            PlanError: The spec does not fit the tensor or its group.

        Communication: as of `redistribute`.
        """
        if dist_spec is not None:
            self.set_dist_spec(dist_spec)
        self.compute_spec = compute_spec

    @property
    def _sharding(self) -> TensorSharding:
        found = sharding_of(self)
        assert found is not None
        return found

    def _distribute(self, spec: ColoTensorSpec | None) -> Self:
        """Remember a spec, for the local values that are here."""
        known = spec or ColoTensorSpec(ProcessGroup())
        with local_operations():
            shape = list(self.shape)
        for dim, number in zip(known.dist_attr.dims, known.dist_attr.num_partitions, strict=True):
            layout_for(known.dist_attr, shape, known.pg)  # which checks the dimension
            shape[dim] *= number
        self._set_sharding(TensorSharding(known.pg, layout_for(known.dist_attr, shape, known.pg), known.compute_attr))
        return self

    def _set_sharding(self, sharding: TensorSharding) -> None:
        set_sharding(self, sharding)


def wrap_local(local: torch.Tensor, sharding: TensorSharding) -> ColoTensor:
    """Make a distributed tensor of local values, through which gradients flow."""
    made = local.as_subclass(ColoTensor)
    set_sharding(made, sharding)
    return made


def _run_local(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def _runs_operations(kind: type) -> bool:
    """Whether a class of tensors has its own way to run operations, for which values may have to be fetched."""
    return kind.__torch_function__ is not torch.Tensor.__torch_function__ and kind.__name__ != "ShardedGradient"
