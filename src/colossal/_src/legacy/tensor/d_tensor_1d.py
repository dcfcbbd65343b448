"""Plain tensors sharded over one group of ranks, and tensors that a program shards by functions of its own."""

from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.legacy.mesh import DeviceMesh
from colossal._src.legacy.tensor.d_tensor import (
    distribute_tensor,
    get_layout,
    get_sharding_spec,
    has_layout,
    init_as_dtensor,
)
from colossal._src.legacy.tensor.d_tensor_layout import ShardingSpec
from colossal._src.tensor import full_tensor_of, placement_of, set_data
from colossal.errors import PlanError

_GATHER, _SHARD = "gather_fn", "shard_fn"
_Function = Callable[[torch.Tensor], torch.Tensor]


def shard_rowwise(
    tensor: torch.Tensor, group_or_device_mesh: dist.ProcessGroup | DeviceMesh | None = None
) -> torch.Tensor:
    """Take this rank's rows of a full tensor.

    Args:
        tensor: The full tensor, the same on all ranks.
        group_or_device_mesh: The ranks; all of them by default.

    Returns:
        The local tensor, which knows its layout.

    Raises:
        PlanError: The rows do not divide by the ranks.

    Communication: none; a new group of processes may be formed.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import shard_rowwise
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     print(shard_rowwise(torch.ones(4, 6)).shape)
        torch.Size([2, 6])
    """
    return _shard(tensor, 0, group_or_device_mesh)


def shard_colwise(
    tensor: torch.Tensor, group_or_device_mesh: dist.ProcessGroup | DeviceMesh | None = None
) -> torch.Tensor:
    """Take this rank's columns of a full tensor: its last dimension is sharded.

    Args:
        tensor: The full tensor, the same on all ranks.
        group_or_device_mesh: The ranks; all of them by default.

    Returns:
        The local tensor, which knows its layout.

    Raises:
        PlanError: The columns do not divide by the ranks.

    Communication: none; a new group of processes may be formed.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import shard_colwise
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     print(shard_colwise(torch.ones(4, 6)).shape)
        torch.Size([4, 3])
    """
    return _shard(tensor, tensor.dim() - 1, group_or_device_mesh)


def get_shard_dim_1d(dtensor: torch.Tensor) -> int:
    """Return the one dimension of a tensor that is sharded.

    Args:
        dtensor: The local tensor.

    Returns:
        Its number.

    Raises:
        PlanError: It has no layout, or another number of its dimensions is sharded.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import get_shard_dim_1d, shard_colwise
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     print(get_shard_dim_1d(shard_colwise(torch.ones(4, 6))))
        1
    """
    dims = [*get_sharding_spec(dtensor).dim_partition_dict]
    if len(dims) != 1:
        raise PlanError(
            f"One dimension of the tensor is sharded. Found {get_sharding_spec(dtensor)}. Ask get_sharding_spec."
        )
    return dims[0]


def is_sharded(dtensor: torch.Tensor) -> bool:
    """Return whether a tensor has the shape that its layout gives this rank.

    Args:
        dtensor: The local tensor.

    Returns:
        True if it has.

    Raises:
        PlanError: It has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import is_sharded, shard_rowwise
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     print(is_sharded(shard_rowwise(torch.ones(4, 6))))
        True
    """
    return dtensor.shape == get_layout(dtensor).get_sharded_shape_per_device()


def sharded_tensor_to_existing_param(dtensor: torch.Tensor, param: nn.Parameter) -> None:
    """Let a parameter hold a local tensor and know its layout.

    Args:
        dtensor: The local tensor.
        param: The parameter, changed in place.

    Raises:
        PlanError: The tensor has no layout.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import get_layout, shard_rowwise, sharded_tensor_to_existing_param
        >>> from colossal.testing import fake_world
        >>> weight = torch.nn.Parameter(torch.ones(4, 6))
        >>> with fake_world(2):
        ...     sharded_tensor_to_existing_param(shard_rowwise(weight.detach()), weight)
        >>> weight.shape, get_layout(weight)
        (torch.Size([2, 6]), Layout([S0, R], (4, 6)))
    """
    layout = get_layout(dtensor)
    set_data(param, dtensor.detach())
    init_as_dtensor(param, layout.device_mesh, layout.sharding_spec, layout.global_shape)


def distribute_tensor_with_customization(
    tensor: torch.Tensor, shard_fn: _Function, gather_fn: _Function
) -> torch.Tensor:
    """Shard a tensor by a function of a program's own.

    Args:
        tensor: The full tensor.
        shard_fn: Makes the local tensor of the full one.
        gather_fn: Makes the full tensor of the local one.

    Returns:
        The local tensor, which knows both functions.

    Raises:
        PlanError: A function cannot be called, or the tensor is distributed already.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import distribute_tensor_with_customization
        >>> distribute_tensor_with_customization(torch.arange(4), lambda x: x[:2], lambda x: x.repeat(2))
        tensor([0, 1])
    """
    return init_tensor_as_customization_distributed(shard_fn(tensor), shard_fn, gather_fn)


def init_tensor_as_customization_distributed(
    tensor: torch.Tensor, shard_fn: _Function, gather_fn: _Function
) -> torch.Tensor:
    """Let a local tensor know by which functions it is sharded and gathered.

    Args:
        tensor: The local tensor.
        shard_fn: Makes it of the full one.
        gather_fn: Makes the full tensor of it.

    Returns:
        The same tensor.

    Raises:
        PlanError: A function cannot be called, or the tensor is distributed already.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import init_tensor_as_customization_distributed as distributed
        >>> from colossal.legacy.d_tensor import is_customized_distributed_tensor
        >>> is_customized_distributed_tensor(distributed(torch.ones(2), lambda x: x[:2], lambda x: x.repeat(2)))
        True
    """
    if not (callable(shard_fn) and callable(gather_fn)) or _knows_functions(tensor):
        raise PlanError(
            "A plain tensor is sharded and gathered by functions. Found "
            f"{'a tensor that has some' if _knows_functions(tensor) else (shard_fn, gather_fn)}. Pass "
            "another tensor, or functions."
        )
    setattr(tensor, _SHARD, shard_fn)
    setattr(tensor, _GATHER, gather_fn)
    return tensor


def is_customized_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a shard that no `ShardingSpec` describes.

    Either it knows functions of a program by which it is sharded and gathered, or `ShardFormer` has sharded it.

    Args:
        tensor: Any tensor.

    Returns:
        True if it is.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import is_customized_distributed_tensor
        >>> is_customized_distributed_tensor(torch.ones(2))
        False
    """
    return _knows_functions(tensor) or (not has_layout(tensor) and placement_of(tensor).is_sharded)


def to_global_for_customized_distributed_tensor(dtensor: torch.Tensor) -> torch.Tensor:
    """Make the full tensor by the function of the program, or of a shard of `ShardFormer` by gathering it.

    Args:
        dtensor: The local tensor.

    Returns:
        The full tensor.

    Raises:
        PlanError: It knows no such function.

    Communication: what the program's function does.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import distribute_tensor_with_customization
        >>> from colossal.legacy.d_tensor import to_global_for_customized_distributed_tensor
        >>> part = distribute_tensor_with_customization(torch.arange(4), lambda x: x[:2], lambda x: x.repeat(2))
        >>> to_global_for_customized_distributed_tensor(part)
        tensor([0, 1, 0, 1])
    """
    if not _knows_functions(dtensor) and is_customized_distributed_tensor(dtensor):
        return full_tensor_of(dtensor)
    _check_customized(dtensor)
    gather: _Function = getattr(dtensor, _GATHER)
    return gather(dtensor)


def customized_distributed_tensor_to_param(dtensor: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
    """Make a parameter of a local tensor, which knows the same functions.

    Args:
        dtensor: The local tensor.
        requires_grad: Whether the parameter is trained.

    Returns:
        The parameter, which shares the memory.

    Raises:
        PlanError: The tensor knows no such functions.

    Example:
        >>> import torch
        >>> from colossal.legacy.d_tensor import customized_distributed_tensor_to_param
        >>> from colossal.legacy.d_tensor import distribute_tensor_with_customization
        >>> part = distribute_tensor_with_customization(torch.ones(4), lambda x: x[:2], lambda x: x.repeat(2))
        >>> customized_distributed_tensor_to_param(part).shape
        torch.Size([2])
    """
    _check_customized(dtensor)
    param = nn.Parameter(dtensor.detach(), requires_grad)
    init_tensor_as_customization_distributed(param, getattr(dtensor, _SHARD), getattr(dtensor, _GATHER))
    return param


def _shard(tensor: torch.Tensor, dim: int, ranks: dist.ProcessGroup | DeviceMesh | None) -> torch.Tensor:
    mesh = ranks if isinstance(ranks, DeviceMesh) else DeviceMesh.from_process_group(ranks or _world())
    return distribute_tensor(tensor, mesh, ShardingSpec(tensor.dim(), {dim: [0]}))


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _knows_functions(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, _SHARD) and hasattr(tensor, _GATHER)


def _check_customized(tensor: torch.Tensor) -> None:
    if not _knows_functions(tensor):
        raise PlanError(
            "A tensor knows by which functions a program shards and gathers it. Found one that does not. Make it with "
            "distribute_tensor_with_customization."
        )
