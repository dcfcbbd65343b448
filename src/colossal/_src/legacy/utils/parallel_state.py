"""What this rank is in the ambient mesh, and what ranks of the mesh do together."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.amp import NoScaler
from colossal._src.cluster import Axis, ParallelMesh, current_mesh
from colossal._src.comm import Channel, all_reduce_over
from colossal._src.interface import OptimizerWrapper, Peers, has_master_weight
from colossal._src.legacy.context import ParallelMode, global_context
from colossal._src.legacy.mesh import grid_of_group
from colossal._src.tensor import broadcast_values, comm_device, local_of, placement_of
from colossal.errors import ConfigError

_SCALED: WeakSet[OptimizerWrapper] = WeakSet()


def _mesh() -> ParallelMesh | None:
    """The mesh in force; None in a process on its own."""
    return current_mesh() if dist.is_initialized() else None


def axis_size(axis: Axis) -> int:
    """Return the number of ranks along an axis of the mesh; 1 in a process on its own."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.size(axis)


def axis_rank(axis: Axis) -> int:
    """Return the index of this rank along an axis of the mesh."""
    mesh = _mesh()
    return 0 if mesh is None else mesh.rank(axis)


def is_dp_rank_0() -> bool:
    """Return whether this is the first of the data-parallel ranks, or there is one only.

    Returns:
        Whether it is.

    Example:
        >>> from colossal.legacy.utils import is_dp_rank_0
        >>> is_dp_rank_0()
        True
    """
    return axis_rank("dp") == 0


def is_tp_rank_0() -> bool:
    """Return whether this is the first of the tensor-parallel ranks, or there is one only.

    Returns:
        Whether it is.

    Example:
        >>> from colossal.legacy.utils import is_tp_rank_0
        >>> is_tp_rank_0()
        True
    """
    return axis_rank("tp") == 0


def is_no_pp_or_last_stage() -> bool:
    """Return whether this rank computes the output of the model: on the last stage of a pipeline, or without one.

    Returns:
        Whether it does.

    Example:
        >>> from colossal.legacy.utils import is_no_pp_or_last_stage
        >>> is_no_pp_or_last_stage()
        True
    """
    return axis_rank("pp") == axis_size("pp") - 1


def is_logging_rank() -> bool:
    """Return whether this is the first of the ranks that compute the output of the model."""
    return is_dp_rank_0() and is_tp_rank_0() and axis_rank("sp") == 0 and is_no_pp_or_last_stage()


def is_using_ddp() -> bool:
    """Return whether there are several data-parallel ranks.

    Returns:
        Whether there are.

    Example:
        >>> from colossal.legacy.utils import is_using_ddp
        >>> is_using_ddp()
        False
    """
    return axis_size("dp") > 1


def is_using_pp() -> bool:
    """Return whether the model is partitioned into pipeline stages.

    Returns:
        Whether it is.

    Example:
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.utils import is_using_pp
        >>> from colossal.testing import fake_world
        >>> with fake_world(4), ParallelMesh(pp=2):
        ...     is_using_pp()
        True
    """
    return axis_size("pp") > 1


def is_using_sequence() -> bool:
    """Return whether sequences are sharded over ranks.

    Returns:
        Whether they are.

    Example:
        >>> from colossal.legacy.utils import is_using_sequence
        >>> is_using_sequence()
        False
    """
    return axis_size("sp") > 1


@contextmanager
def switch_virtual_pipeline_parallel_rank(rank: int | None) -> Iterator[None]:
    """Be another chunk of an interleaved pipeline inside, as `global_context` says.

    Args:
        rank: The number of the chunk; None for no chunks.

    Yields:
        Nothing.

    Example:
        >>> from colossal.legacy.context import global_context
        >>> from colossal.legacy.utils import switch_virtual_pipeline_parallel_rank
        >>> from colossal.testing import fake_world
        >>> with fake_world(2), switch_virtual_pipeline_parallel_rank(1):
        ...     global_context.virtual_pipeline_parallel_rank
        1
    """
    before = global_context.virtual_pipeline_parallel_rank
    global_context.set_virtual_pipeline_parallel_rank(rank)
    try:
        yield
    finally:
        global_context.set_virtual_pipeline_parallel_rank(before)


def sync_model_param(model: nn.Module, parallel_mode: ParallelMode = ParallelMode.DATA) -> None:
    """Give all ranks of a group the parameters and buffers of the first one.

    Args:
        model: The model, of the same structure on these ranks.
        parallel_mode: The group: by default the data-parallel ranks.

    Communication: broadcast, dp or the axis of the mode, the model's bytes.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from colossal.legacy.utils import sync_model_param
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, dist.get_rank())
        ...     sync_model_param(model)
        ...     return model.weight.item()
        >>> run_threads(program, 2)
        [0.0, 0.0]
    """
    values = [*model.parameters(), *model.buffers()]
    if parallel_mode is not ParallelMode.DATA:
        if global_context.is_initialized(parallel_mode) and global_context.get_world_size(parallel_mode) > 1:
            Channel("tp", grid_of_group(global_context.get_group(parallel_mode))).broadcast(values)
    elif is_using_ddp():
        broadcast_values(values, current_mesh())


def clip_grad_norm_fp32(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> float:
    """Scale gradients by one factor so that their common norm, over all ranks that hold some, is at most `max_norm`.

    Args:
        parameters: The parameters that this rank holds; of a pipeline those of its stage. Their gradients are changed
            in place, and divided by the loss scale before, if an engine or `convert_to_amp` scales the loss.
        max_norm: The largest norm that is left.
        norm_type: The p of the p-norm.

    Returns:
        The norm before clipping; the same on all ranks.

    Raises:
        ConfigError: An optimizer has master weights of the parameters, and the gradients.
        UnsupportedError: The gradients are sharded, and `norm_type` is not greater than 0.

    Communication: all_reduce, the axes that shard gradients and pp, 8 bytes each; before, as in
    `OptimizerWrapper.unscale_grad`.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import clip_grad_norm_fp32
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_fp32([weight], max_norm=1.0), round(weight.grad[0].item(), 4)
        (5.0, 0.6)
    """
    held = _with_gradients(parameters)
    for optimizer in list(_SCALED):
        if any(each is parameter for each in optimizer.parameters for parameter in held):
            optimizer.unscale_grad()
    # what clips is the wrapper, which knows shards and peers; the optimizer in it takes no step
    groups = [{"params": held}]  # a stage may have no parameters
    wrapper = OptimizerWrapper(torch.optim.SGD(groups, lr=0.0), peers=_pipeline_peers())
    return float(wrapper.clip_grad_by_norm(max_norm, norm_type))


def count_zeros_fp32(parameters: torch.Tensor | Iterable[torch.Tensor]) -> int:
    """Count the elements of gradients that are exactly 0, over all ranks that hold some.

    Args:
        parameters: The parameters that this rank holds; of a pipeline those of its stage.

    Returns:
        The number for the full model; the same on all ranks.

    Raises:
        ConfigError: An optimizer has master weights of the parameters, and the gradients.

    Communication: all_reduce, the axes that shard gradients and pp, 8 bytes each.

    Example:
        >>> import torch
        >>> from colossal.legacy.utils import count_zeros_fp32
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> weight.grad = torch.tensor([3.0, 0.0, 0.0])
        >>> count_zeros_fp32([weight])
        2
    """
    held = _with_gradients(parameters)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in held:
        placement = placement_of(parameter)
        if placement.is_counted:
            by_groups.setdefault(placement.shard_groups, []).append(parameter)
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for groups, same in by_groups.items():
        grads = (local_of(parameter.grad) for parameter in same if parameter.grad is not None)
        zeros = torch.tensor(sum(int((grad == 0).sum()) for grad in grads), device=comm_device(same[0]))
        total += all_reduce_over(zeros, groups).cpu()
    peers = _pipeline_peers()
    return int(total if peers is None else all_reduce_over(total.to(peers.device), peers.groups))


def note_loss_scale(optimizer: OptimizerWrapper) -> None:
    """Remember an optimizer whose gradients are multiplied by a loss scale until they are measured or used."""
    if not isinstance(optimizer.scaler, NoScaler):
        _SCALED.add(optimizer)


def _with_gradients(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters as a list; refused if their gradients are elsewhere."""
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if number := sum(map(has_master_weight, held)):
        raise ConfigError(
            "Gradients are measured and clipped where they are: of an optimizer with master weights, or with shards, "
            f"in these. Found {number} parameters of the model, which have none. Write clip_grad_norm=... in the "
            "config, or pass engine.optimizer.parameters after engine.optimizer.unscale_grad()."
        )
    return held


def _pipeline_peers() -> Peers | None:
    """The other stages, which have other parameters of the model."""
    mesh = _mesh()
    if mesh is None or mesh.size("pp") == 1:
        return None
    return Peers((mesh.group("pp"),), mesh.accelerator.get_current_device())
