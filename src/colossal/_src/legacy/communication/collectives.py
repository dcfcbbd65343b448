"""Collectives among the ranks of a parallel mode, without gradients; `colossal.comm` has those of today."""

from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.comm import Channel
from colossal._src.legacy.context import ParallelMode, global_context
from colossal._src.legacy.mesh import RankGrid
from colossal._src.legacy.notice import superseded
from colossal.errors import MeshError, UnsupportedError

_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


@final
class _Finished:
    """The handle of a collective that is over."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def all_gather(tensor: torch.Tensor, dim: int, parallel_mode: ParallelMode, async_op: bool = False) -> Any:
    """Join the tensors of all ranks along a dimension, in rank order.

    Args:
        tensor: Any shape, the same on all ranks.
        dim: The dimension that grows by the number of ranks.
        parallel_mode: Whose ranks.
        async_op: Return a handle too, of a collective that is over.

    Returns:
        The joined tensor; or a pair of it and the handle.

    Raises:
        MeshError: There is no such group.

    Communication: all_gather, the mode, the result's bytes.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import all_gather
        >>> from colossal.legacy.context import ParallelMode, global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.init_parallel_groups()
        ...     return all_gather(torch.tensor([global_context.get_global_rank()]), 0, ParallelMode.GLOBAL).tolist()
        >>> run_threads(program, 2)
        [[0, 1], [0, 1]]
    """
    return _result(_channel("all_gather", parallel_mode).all_gather(tensor, dim), async_op)


def reduce_scatter(
    tensor: torch.Tensor,
    dim: int,
    parallel_mode: ParallelMode,
    op: Any = _SUM,
    async_op: bool = False,
) -> Any:
    """Sum the tensors of all ranks, and keep this rank's shard of the sum.

    Args:
        tensor: Any shape, the same on all ranks.
        dim: The dimension that is sharded.
        parallel_mode: Whose ranks.
        op: ``ReduceOp.SUM``.
        async_op: Return a handle too, of a collective that is over.

    Returns:
        The shard; or a pair of it and the handle.

    Raises:
        MeshError: There is no such group.
        ShapeError: The dimension does not divide by the number of ranks.
        UnsupportedError: Another `op`.

    Communication: reduce_scatter, the mode, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import reduce_scatter
        >>> from colossal.legacy.context import ParallelMode, global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.init_parallel_groups()
        ...     return reduce_scatter(torch.arange(2), 0, ParallelMode.GLOBAL).tolist()
        >>> run_threads(program, 2)
        [[0], [2]]
    """
    _check(op, _SUM)
    return _result(_channel("reduce_scatter", parallel_mode).reduce_scatter(tensor, dim), async_op)


def all_reduce(tensor: torch.Tensor, parallel_mode: ParallelMode, op: Any = _SUM, async_op: bool = False) -> Any:
    """Sum the tensors of all ranks, in place.

    Args:
        tensor: Any shape, the same on all ranks; it gets the sum.
        parallel_mode: Whose ranks.
        op: ``ReduceOp.SUM`` or ``ReduceOp.MAX``.
        async_op: Return a handle too, of a collective that is over.

    Returns:
        The tensor; or a pair of it and the handle.

    Raises:
        MeshError: There is no such group.
        UnsupportedError: Another `op`.

    Communication: all_reduce, the mode, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import all_reduce
        >>> from colossal.legacy.context import ParallelMode, global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.init_parallel_groups()
        ...     return all_reduce(torch.ones(1), ParallelMode.GLOBAL).tolist()
        >>> run_threads(program, 2)
        [[2.0], [2.0]]
    """
    _check(op, _SUM, _MAX)
    total = _channel("all_reduce", parallel_mode).all_reduce(tensor.detach(), "max" if op == _MAX else "sum")
    with torch.no_grad():
        tensor.copy_(total)
    return _result(tensor, async_op)


def broadcast(tensor: torch.Tensor, src: int, parallel_mode: ParallelMode, async_op: bool = False) -> Any:
    """Give all ranks the tensor of one of them, in place.

    Args:
        tensor: Contiguous, of the same shape on all ranks.
        src: The global rank that has the values.
        parallel_mode: Whose ranks.
        async_op: Return a handle too, of a collective that is over.

    Returns:
        The tensor; or a pair of it and the handle.

    Raises:
        MeshError: There is no such group, or the rank is not in it.

    Communication: broadcast, the mode, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import broadcast
        >>> from colossal.legacy.context import ParallelMode, global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.init_parallel_groups()
        ...     return broadcast(torch.tensor([global_context.get_global_rank()]), 1, ParallelMode.GLOBAL).tolist()
        >>> run_threads(program, 2)
        [[1], [1]]
    """
    channel = _channel("broadcast", parallel_mode)
    work = channel.start_broadcast(tensor.detach(), _place(src, parallel_mode))
    if work is not None:
        work.wait()
    return _result(tensor, async_op)


def reduce(tensor: torch.Tensor, dst: int, parallel_mode: ParallelMode, op: Any = _SUM, async_op: bool = False) -> Any:
    """Sum the tensors of all ranks for one of them, in place; what the others hold afterwards is undefined.

    Args:
        tensor: Contiguous, of the same shape on all ranks.
        dst: The global rank that gets the sum.
        parallel_mode: Whose ranks.
        op: ``ReduceOp.SUM``.
        async_op: Return a handle too, of a collective that is over.

    Returns:
        The tensor; or a pair of it and the handle.

    Raises:
        MeshError: There is no such group, or the rank is not in it.
        UnsupportedError: Another `op`.

    Communication: reduce, the mode, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal.legacy.communication import reduce
        >>> from colossal.legacy.context import ParallelMode, global_context
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     global_context.init_parallel_groups()
        ...     return reduce(torch.ones(1), 0, ParallelMode.GLOBAL).tolist()
        >>> run_threads(program, 2)[0]
        [2.0]
    """
    _check(op, _SUM)
    work = _channel("reduce", parallel_mode).start_reduce(tensor.detach(), _place(dst, parallel_mode))
    if work is not None:
        work.wait()
    return _result(tensor, async_op)


def _channel(name: str, mode: ParallelMode) -> Channel:
    superseded(f"colossal.communication.{name}", f"colossal.comm.Channel(axis), which has {name}")
    ranks = global_context.get_ranks_in_group(mode)
    grid = RankGrid(torch.tensor(ranks, device="cpu").reshape(-1, 1, 1))
    if len(ranks) > 1:
        grid.set_group("pp", global_context.get_group(mode))
    return Channel("pp", grid.as_mesh())


def _place(rank: int, mode: ParallelMode) -> int:
    ranks = global_context.get_ranks_in_group(mode)
    if rank not in ranks:
        raise MeshError(f"A group of {mode} takes one of its global ranks, {ranks}. Found {rank}. Pass one of them.")
    return ranks.index(rank)


def _check(op: Any, *allowed: Any) -> None:
    if op not in allowed:
        names = " or ".join(str(each) for each in allowed)
        raise UnsupportedError(f"This collective takes {names}. Found {op}. Scale what a sum gives.")


def _result(tensor: torch.Tensor, async_op: bool) -> Any:
    return (tensor, _Finished()) if async_op else tensor
