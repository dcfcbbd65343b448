# pyright: reportUnknownMemberType=false
"""Plain tensors that carry a layout on a `DeviceMesh`, and conversions between such layouts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.legacy.mesh import DeviceMesh
from colossal._src.legacy.tensor.d_tensor_layout import DTensorLayout, ShardingSpec
from colossal._src.tensor import full_tensor_of, placement_of, relayout, set_data, shard
from colossal.errors import PlanError, UnsupportedError

_ATTR = "dist_layout"


def distribute_tensor(tensor: torch.Tensor, device_mesh: DeviceMesh, sharding_spec: ShardingSpec) -> torch.Tensor:
    """Take this rank's shard of a full tensor.

    Args:
        tensor: The full tensor, the same on all ranks.
        device_mesh: The mesh.
        sharding_spec: How its dimensions are sharded.

    Returns:
        The local tensor, which knows its layout.

    Raises:
        PlanError: The sharding does not fit the tensor or the mesh.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(tensor.shape)
        torch.Size([2, 3])
    """
    layout = DTensorLayout(device_mesh, sharding_spec, tensor.shape)
    return _tag(shard(tensor, layout.layout, dist.get_rank()), layout)


def init_as_dtensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, sharding_spec: ShardingSpec, global_shape: Sequence[int]
) -> torch.Tensor:
    """Let a local tensor know its layout.

    Args:
        tensor: What this rank holds.
        device_mesh: The mesh.
        sharding_spec: How the dimensions are sharded.
        global_shape: The shape of the full tensor.

    Returns:
        The same tensor.

    Raises:
        PlanError: The sharding does not fit the shape or the mesh, or the tensor is not of the local shape.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, get_layout, init_as_dtensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     print(get_layout(init_as_dtensor(torch.ones(2, 3), mesh, ShardingSpec(2, {0: [0]}), (4, 3))))
        Layout([S0, R], (4, 3))
    """
    layout = DTensorLayout(device_mesh, sharding_spec, global_shape)
    if tensor.shape != layout.get_sharded_shape_per_device():
        raise PlanError(
            f"By its layout this rank holds {tuple(layout.get_sharded_shape_per_device())}. Found "
            f"{tuple(tensor.shape)}. Pass the local tensor."
        )
    return _tag(tensor, layout)


def redistribute(dtensor: torch.Tensor, device_mesh: DeviceMesh, sharding_spec: ShardingSpec) -> torch.Tensor:
    """Convert a tensor to another sharding, in place.

    Args:
        dtensor: The local tensor.
        device_mesh: Its mesh.
        sharding_spec: The new sharding.

    Returns:
        The same tensor.

    Raises:
        UnsupportedError: It was computed from others, whose gradients would be lost.
        PlanError: It has no layout, or is on another mesh.

    Communication: that of the cheapest path, see `colossal.tensor.plan_relayout`.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, redistribute
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2))
        ...     print(redistribute(tensor, mesh, ShardingSpec(2, {0: [0]})).shape)
        torch.Size([2, 3])
    """
    if dtensor.grad_fn is not None:
        raise UnsupportedError(
            "A tensor that autograd follows is not converted in place. Found one with a gradient function. Use "
            "LayoutConverter().apply, through which gradients flow."
        )
    source = get_layout(dtensor)
    target = DTensorLayout(device_mesh, sharding_spec, source.global_shape)
    with torch.no_grad():
        set_data(dtensor, convert(dtensor.detach(), source, target))
    return _tag(dtensor, target)


def to_global(dtensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor on all ranks; gradients flow back to the shards, but for those of a sharded layer.

    Args:
        dtensor: The local tensor.

    Returns:
        The full tensor.

    Raises:
        PlanError: It has no layout.

    Communication: all_gather, the axes that shard it, its bytes.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, to_global
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     return to_global(distribute_tensor(torch.arange(4.0), mesh, ShardingSpec(1, {0: [0]}))).tolist()
        >>> run_threads(program, 2)
        [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """
    if not has_layout(dtensor) and _is_shard_of_layer(dtensor):
        return full_tensor_of(dtensor)
    source = get_layout(dtensor)
    target = DTensorLayout(source.device_mesh, ShardingSpec(len(source.global_shape)), source.global_shape)
    return relayout(dtensor, source.layout, target.layout, source.device_mesh.grid.as_mesh()).clone()


def sharded_tensor_to_param(dtensor: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
    """Make a parameter of a local tensor, which knows the same layout.

    Args:
        dtensor: The local tensor.
        requires_grad: Whether the parameter is trained.

    Returns:
        The parameter, which shares the memory.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_layout, sharded_tensor_to_param
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_layout(sharded_tensor_to_param(tensor)))
        Layout([S0, R], (4, 3))
    """
    return _tag(nn.Parameter(dtensor.detach(), requires_grad), get_layout(dtensor))


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor knows a layout, or is a shard of a parameter of a sharded layer.

    Args:
        tensor: Any tensor.

    Returns:
        True if it is either.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, is_distributed_tensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(is_distributed_tensor(tensor), is_distributed_tensor(torch.ones(2)))
        True False
    """
    return has_layout(tensor) or _is_shard_of_layer(tensor)


def has_layout(tensor: torch.Tensor) -> bool:
    """Whether a tensor knows a layout on a `DeviceMesh`."""
    return hasattr(tensor, _ATTR)


def _is_shard_of_layer(tensor: torch.Tensor) -> bool:
    """Whether it is the shard of a parameter that a sharding specification describes: one without packed blocks."""
    layout = placement_of(tensor).layout if placement_of(tensor).is_sharded else None
    return layout is not None and all(len(lengths) == 1 for lengths in layout.groups)


def get_layout(dtensor: torch.Tensor) -> DTensorLayout:
    """Return the layout of a tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The layout.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_layout
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_layout(tensor))
        Layout([S0, R], (4, 3))
    """
    if not has_layout(dtensor):
        raise PlanError(
            f"A distributed tensor knows its layout. Found a plain one of {tuple(dtensor.shape)}. Make it with "
            "distribute_tensor, or call init_as_dtensor."
        )
    return getattr(dtensor, _ATTR)


def get_global_shape(dtensor: torch.Tensor) -> torch.Size:
    """Return the shape of the full tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The shape.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_global_shape
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_global_shape(tensor))
        torch.Size([4, 3])
    """
    if not has_layout(dtensor) and _is_shard_of_layer(dtensor):
        return torch.Size(placement_of(dtensor).shape)
    return get_layout(dtensor).global_shape


def get_device_mesh(dtensor: torch.Tensor) -> DeviceMesh:
    """Return the mesh of a tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The mesh.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_device_mesh
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_device_mesh(tensor) is mesh)
        True
    """
    return get_layout(dtensor).device_mesh


def get_sharding_spec(dtensor: torch.Tensor) -> ShardingSpec:
    """Return how the dimensions of a tensor are sharded.

    Args:
        dtensor: The local tensor.

    Returns:
        The sharding.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, distribute_tensor, get_sharding_spec
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(get_sharding_spec(tensor))
        ShardingSpec([S0, R])
    """
    if not has_layout(dtensor) and _is_shard_of_layer(dtensor):
        dims = placement_of(dtensor).layout.dims
        return ShardingSpec(len(dims), dict(enumerate(dims)))
    return get_layout(dtensor).sharding_spec


def compute_global_numel(dtensor: torch.Tensor) -> int:
    """Return the number of elements of the full tensor.

    Args:
        dtensor: The local tensor.

    Returns:
        The number.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import ShardingSpec, compute_global_numel, distribute_tensor
        >>> from colossal.legacy.device import DeviceMesh
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = DeviceMesh(torch.arange(2), (2,))
        ...     tensor = distribute_tensor(torch.ones(4, 3), mesh, ShardingSpec(2, {0: [0]}))
        ...     print(compute_global_numel(tensor))
        12
    """
    return get_global_shape(dtensor).numel()


def convert(tensor: torch.Tensor, source: DTensorLayout, target: DTensorLayout) -> torch.Tensor:
    """Convert a local tensor to another layout, which it knows then."""
    return _tag(relayout(tensor, source.layout, target.layout, source.device_mesh.grid.as_mesh()).clone(), target)


def copy_layout(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Let another local tensor have the layout of one."""
    return _tag(target, get_layout(source))


def _tag(tensor: Any, layout: DTensorLayout) -> Any:
    setattr(tensor, _ATTR, layout)
    return tensor
