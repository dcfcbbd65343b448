"""Split a full input over ranks, and gather a full output from them."""

import torch

from colossal._src import comm
from colossal._src.cluster import Axis, ParallelMesh
from colossal._src.comm import Channel
from colossal._src.nn.layer.tp.sharding import find_mesh, tp_sharding_of
from colossal.errors import ShapeError


def split_input(x: torch.Tensor, mesh: ParallelMesh | None = None, *, features: bool | None = None) -> torch.Tensor:
    """Keep this rank's local shard of an input that is replicated along the tp axis.

    The first dimension is sharded by the token axes, the last one by the feature axes, as `torch.chunk` splits; in 1D,
    or without a mesh, neither is.

    Args:
        x: The full input: activations, or token ids and labels.
        mesh: The mesh; the ambient one by default.
        features: Whether the last dimension holds features; by default if `x` is floating-point and has several
            dimensions. Pass False for images, whose last dimension is their width.

    Returns:
        This rank's local shard; `x` itself if nothing is sharded.

    Raises:
        ShapeError: `x` has no dimension to shard.

    Communication: none forward; backward all_gather, the sharding axes, the bytes of `x`.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal._src.cluster import Axis
        >>> from colossal.nn import split_input
        >>> from colossal.testing import fake_world
        >>> with fake_world(8), ParallelMesh(tp=8, tp_mode="2.5d", tp_depth=2):
        ...     split_input(torch.zeros(16, 256)).shape
        torch.Size([4, 128])
    """
    mesh = find_mesh(mesh)
    plan = tp_sharding_of(mesh)
    has_features = features if features is not None else x.is_floating_point() and x.dim() > 1
    if plan.tokens and x.dim() < 1 + has_features:
        raise ShapeError(
            f"An input has tokens first{' and features last' if has_features else ''}. Found the shape "
            f"{tuple(x.shape)}. Add the dimension that is missing."
        )
    for axis in plan.tokens:
        x = comm.scatter(x, axis, 0, mesh, uneven=True)
    for axis in plan.features if has_features else ():
        x = comm.scatter(x, axis, -1, mesh, uneven=True)
    return x


def gather_output(y: torch.Tensor, mesh: ParallelMesh | None = None, *, features: bool | None = None) -> torch.Tensor:
    """Gather an output that is sharded along the tp axis.

    All ranks go on to compute the same from it, such as a loss: its gradient is the same on all of them.

    Args:
        y: This rank's local shard, split as by `split_input`.
        mesh: The mesh; the ambient one by default.
        features: Whether the last dimension is sharded; by default if `y` is floating-point and has several dimensions.

    Returns:
        The full output, on all ranks; `y` itself if nothing is sharded.

    Communication: all_gather, the sharding axes, the bytes of the full output, and 8 bytes for each rank, as shards
    need not be of one length; none backward.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal._src.cluster import Axis
        >>> from colossal.nn import gather_output, split_input
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=4, tp_mode="2d"):
        ...         full = torch.arange(6.0).view(3, 2)
        ...         return bool((gather_output(split_input(full)) == full).all())
        >>> run_threads(program, 4)
        [True, True, True, True]
    """
    mesh = find_mesh(mesh)
    plan = tp_sharding_of(mesh)
    has_features = features if features is not None else y.is_floating_point() and y.dim() > 1
    # In the opposite order of `split_input`, as the lengths of shards follow from the outer axes.
    for axis in reversed(plan.features if has_features else ()):
        y = _join(y, axis, -1, mesh)
    for axis in reversed(plan.tokens):
        y = _join(y, axis, 0, mesh)
    return y


def _join(y: torch.Tensor, axis: Axis, dim: int, mesh: ParallelMesh | None) -> torch.Tensor:
    assert mesh is not None
    length = sum(Channel(axis, mesh).lengths(y.shape[dim]))
    return comm.gather(y, axis, dim, mesh, length=length)
