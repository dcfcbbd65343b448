"""Collectives that autograd understands.

Each is a pair: what runs forward, and what its gradient runs backward.

======================  ====================  =====================================================================
function                forward               backward
======================  ====================  =====================================================================
replicate               nothing               all-reduce: every rank's copy was used, so their gradients add up
reduce                  all-reduce            nothing: every rank's partial sum has the gradient of the sum
gather                  all-gather            split: every rank computes the same from the full tensor
gather, partial_grad    all-gather            reduce-scatter: the ranks compute different things from the full tensor
scatter                 split                 all-gather: the shards' gradients make up that of the full tensor
reduce_scatter          reduce-scatter        all-gather
all_to_all              all-to-all            all-to-all the other way
exchange_rows           uneven all-to-all     uneven all-to-all the other way
======================  ====================  =====================================================================

Where the number of ranks does not divide a dimension, the shards are the chunks of `torch.chunk`, and are padded with
zeros for communication. The backward function of each pair is differentiable in turn.

Source: Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053 (replicate and reduce are its f and g).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm.channel import Channel, chunk_bounds, pad_dim
from colossal.errors import ShapeError

_Map = Callable[[torch.Tensor], torch.Tensor]


class _Pair(torch.autograd.Function):
    """Applies one map to the tensor and another to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ahead: _Map, back: _Map) -> torch.Tensor:
        ctx.ahead, ctx.back = ahead, back
        result = ahead(tensor)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Pair.apply(grads[0], ctx.back, ctx.ahead), None, None


def replicate(tensor: torch.Tensor, axis: Axis, mesh: ParallelMesh | None = None) -> torch.Tensor:
    """Use one tensor, which is the same on all ranks, on all of them.

    Args:
        tensor: Any shape, the same values on all ranks of the axis.
        axis: The axis of the mesh.
        mesh: The mesh; the ambient one by default.

    Returns:
        The same values; the gradient is the sum of the ranks' gradients.

    Communication: none forward; backward all_reduce, the axis, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2) as mesh:
        ...         shared = torch.ones(1, requires_grad=True)
        ...         own_use = (mesh.rank("tp") + 1) * comm.replicate(shared, "tp")
        ...         own_use.backward()
        ...         return shared.grad  # 1 from one rank, 2 from the other
        >>> run_threads(program, 2)
        [tensor([3.]), tensor([3.])]
    """
    channel = _channel(axis, mesh)
    return _apply(tensor, _nothing, channel.all_reduce)


def reduce(tensor: torch.Tensor, axis: Axis, mesh: ParallelMesh | None = None) -> torch.Tensor:
    """Sum the ranks' tensors.

    Args:
        tensor: Any shape, the same on all ranks of the axis.
        axis: The axis of the mesh.
        mesh: The mesh; by default the ambient one, which after `launch` has all ranks on dp, whatever the plugin.

    Returns:
        The sum, on all ranks; same shape.

    Communication: all_reduce, the axis, the tensor's bytes; none backward.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2) as mesh:
        ...         return comm.reduce(torch.tensor([mesh.rank("tp") + 1]), "tp")
        >>> run_threads(program, 2)
        [tensor([3]), tensor([3])]
    """
    channel = _channel(axis, mesh)
    return _apply(tensor, channel.all_reduce, _nothing)


def gather(
    tensor: torch.Tensor,
    axis: Axis,
    dim: int = -1,
    mesh: ParallelMesh | None = None,
    *,
    partial_grad: bool = False,
    length: int | None = None,
) -> torch.Tensor:
    """Join the ranks' tensors along a dimension.

    Args:
        tensor: Any shape, the same on all ranks of the axis.
        axis: The axis of the mesh.
        dim: The dimension that grows by the size of the axis.
        mesh: The mesh; by default the ambient one, which after `launch` has all ranks on dp, whatever the plugin.
        partial_grad: The ranks compute different things from the full tensor, so that each holds only a partial sum of
            its gradient. Leave it False where all ranks compute the same.
        length: The length of the full dimension, if it need not be a multiple of the number of ranks.

    Returns:
        The full tensor, on all ranks.

    Raises:
        ShapeError: The tensor has no such dimension, or is not this rank's shard of that length.

    Communication: all_gather, the axis, the result's bytes; backward none, or for a partial gradient reduce_scatter,
    the axis, the result's bytes.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2) as mesh:
        ...         return comm.gather(torch.tensor([mesh.rank("tp") + 1]), "tp")
        >>> run_threads(program, 2)
        [tensor([1, 2]), tensor([1, 2])]
    """
    channel = _channel(axis, mesh)
    back = channel.reduce_scatter if partial_grad else channel.split
    if length is not None and length % channel.size:
        _check_part(tensor, dim, length, channel)
        padded = pad_dim(tensor, dim, -(-length // channel.size))
        # `torch.chunk` makes short chunks last, so that all padding is at the end of the gathered dimension.
        return gather(padded, axis, dim, mesh, partial_grad=partial_grad).narrow(dim, 0, length)
    return _apply(tensor, lambda x: channel.all_gather(x, dim), lambda g: back(g, dim))


def scatter(
    tensor: torch.Tensor, axis: Axis, dim: int = -1, mesh: ParallelMesh | None = None, *, uneven: bool = False
) -> torch.Tensor:
    """Keep this rank's shard of a tensor that is the same on all ranks.

    Args:
        tensor: Any shape, the same values on all ranks of the axis.
        axis: The axis of the mesh.
        dim: The dimension that is sharded over the ranks.
        mesh: The mesh; the ambient one by default.
        uneven: Whether shards may have different lengths.

    Returns:
        This rank's shard.

    Raises:
        ShapeError: The tensor has no such dimension, or its length must divide by the size of the axis and does not.

    Communication: none forward; backward all_gather, the axis, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2):
        ...         return comm.scatter(torch.arange(4), "tp")
        >>> run_threads(program, 2)
        [tensor([0, 1]), tensor([2, 3])]
    """
    channel = _channel(axis, mesh)
    if uneven and tensor.shape[dim] % channel.size:
        return _uneven(scatter, tensor, dim, channel)
    return _apply(tensor, lambda x: channel.split(x, dim), lambda g: channel.all_gather(g, dim))


def reduce_scatter(
    tensor: torch.Tensor, axis: Axis, dim: int = -1, mesh: ParallelMesh | None = None, *, uneven: bool = False
) -> torch.Tensor:
    """Sum the ranks' tensors and keep this rank's shard of the sum.

    Args:
        tensor: Any shape, the same on all ranks of the axis.
        axis: The axis of the mesh.
        dim: The dimension that is sharded over the ranks.
        mesh: The mesh; the ambient one by default.
        uneven: Whether shards may have different lengths.

    Returns:
        This rank's shard of the sum.

    Raises:
        ShapeError: The tensor has no such dimension, or its length must divide by the size of the axis and does not.

    Communication: reduce_scatter, the axis, the tensor's bytes; backward all_gather, the axis, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2):
        ...         return comm.reduce_scatter(torch.arange(4), "tp")
        >>> run_threads(program, 2)
        [tensor([0, 2]), tensor([4, 6])]
    """
    channel = _channel(axis, mesh)
    if uneven and tensor.shape[dim] % channel.size:
        return _uneven(reduce_scatter, tensor, dim, channel)
    return _apply(tensor, lambda x: channel.reduce_scatter(x, dim), lambda g: channel.all_gather(g, dim))


def all_to_all(
    tensor: torch.Tensor,
    axis: Axis,
    split_dim: int,
    join_dim: int,
    mesh: ParallelMesh | None = None,
    *,
    join_length: int | None = None,
) -> torch.Tensor:
    """Shard the tensor along one dimension instead of another.

    Args:
        tensor: Any shape, the same on all ranks of the axis.
        axis: The axis of the mesh.
        split_dim: The dimension that is sharded over the ranks.
        join_dim: The dimension that was sharded, and is full afterwards.
        mesh: The mesh; the ambient one by default.
        join_length: The length that it then has, if neither dimension need be a multiple of the number of ranks.

    Returns:
        A tensor with `split_dim` shorter and `join_dim` longer by the size of the axis.

    Raises:
        ShapeError: The tensor has no such dimension, or is not this rank's shard of that length; or without it,
            `split_dim` does not divide by the size of the axis.

    Communication: all_to_all, the axis, the tensor's bytes; backward all_to_all, the axis, the tensor's bytes.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2) as mesh:
        ...         row = 2 * mesh.rank("tp") + torch.arange(2)[None]  # rank 0 holds [[0, 1]], rank 1 [[2, 3]]
        ...         return comm.all_to_all(row, "tp", split_dim=1, join_dim=0).tolist()
        >>> run_threads(program, 2)
        [[[0], [2]], [[1], [3]]]
    """
    channel = _channel(axis, mesh)
    full = tensor.shape[split_dim]
    if join_length is not None and (join_length % channel.size or full % channel.size):
        _check_part(tensor, join_dim, join_length, channel)
        most = [-(-length // channel.size) for length in (full, join_length)]
        padded = pad_dim(pad_dim(tensor, split_dim, most[0] * channel.size), join_dim, most[1])
        moved = all_to_all(padded, axis, split_dim, join_dim, mesh)
        own = chunk_bounds(full, channel.size, channel.rank)[1]
        return moved.narrow(split_dim, 0, own).narrow(join_dim, 0, join_length)
    return _apply(
        tensor,
        lambda x: channel.all_to_all(x, split_dim, join_dim),
        lambda g: channel.all_to_all(g, join_dim, split_dim),
    )


def exchange_rows(
    rows: torch.Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], mesh: ParallelMesh | None = None
) -> torch.Tensor:
    """Send each rank the rows that are for it, and join what comes in; their gradients go back the same way.

    Args:
        rows: Of shape (sum of `send`, ...): those for the first rank, those for the second, and so on.
        axis: The axis of the mesh.
        send: How many rows go to each rank, this one included.
        receive: How many come from each rank: what that one's `send` says of this rank.
        mesh: The mesh; the ambient one by default.

    Returns:
        The rows that came in, in the order of the ranks that sent them, of shape (sum of `receive`, ...).

    Communication: all_to_all, the axis, the bytes of the rows that leave this rank; backward all_to_all, the axis, the
    bytes of the gradients that do.

    Example:
        >>> import torch
        >>> from colossal._src import comm
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=2) as mesh:
        ...         rank = mesh.rank("tp")
        ...         rows = 10 * rank + torch.arange(3)[:, None]  # one for rank 0, two for rank 1
        ...         return comm.exchange_rows(rows, "tp", [1, 2], [rank + 1, rank + 1]).flatten().tolist()
        >>> run_threads(program, 2)
        [[0, 10], [1, 2, 11, 12]]
    """
    channel = _channel(axis, mesh)
    return _apply(
        rows,
        lambda x: channel.exchange_rows(x, send, receive),
        lambda g: channel.exchange_rows(g, receive, send),
    )


def _uneven(op: Callable[..., torch.Tensor], tensor: torch.Tensor, dim: int, channel: Channel) -> torch.Tensor:
    """Shard a tensor that is padded to a multiple of the number of ranks, and remove the padding from the shard."""
    length = tensor.shape[dim]
    padded = pad_dim(tensor, dim, -(-length // channel.size) * channel.size)
    return op(padded, channel.axis, dim, channel.mesh).narrow(
        dim, 0, chunk_bounds(length, channel.size, channel.rank)[1]
    )


def _check_part(tensor: torch.Tensor, dim: int, length: int, channel: Channel) -> None:
    expected = chunk_bounds(length, channel.size, channel.rank)[1]
    if tensor.shape[dim] != expected:
        raise ShapeError(
            f"A dimension of {length} that is sharded over {channel.size} ranks as by torch.chunk has {expected} on "
            f"rank {channel.rank}. Found dimension {dim} of shape {tuple(tensor.shape)}. Pass this rank's shard."
        )


def _channel(axis: Axis, mesh: ParallelMesh | None) -> Channel:
    return Channel(axis) if mesh is None else Channel(axis, mesh)


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _apply(tensor: torch.Tensor, ahead: _Map, back: _Map) -> torch.Tensor:
    result = _Pair.apply(tensor, ahead, back)
    assert isinstance(result, torch.Tensor)
    return result


_OPAQUE = ["colossal._src.comm"]


def end_graphs_in(module: str) -> None:
    """Keep torch.compile from tracing a module as well, see `end_graphs_at_collectives`."""
    _OPAQUE.append(module)


def end_graphs_at_collectives() -> None:
    """Keep torch.compile from tracing collectives: a process group written in Python is opaque to it, and an error."""
    if "torch._dynamo" in sys.modules:  # a compiled model has imported it, and so has every optimizer
        _skip(tuple(_OPAQUE))


@cache
def _skip(modules: tuple[str, ...]) -> None:
    from torch._dynamo import trace_rules

    for module in modules:
        trace_rules.add(module)
