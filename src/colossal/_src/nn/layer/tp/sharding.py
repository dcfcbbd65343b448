"""How activations are sharded over the ranks of the tp axis, in each of its modes.

An activation has tokens (its first dimension) and features (its last). Which axes shard which of the two is all that
most layers need to know; the products of `colossal.nn.Linear` are in `colossal._src.nn.layer.tp.linear_product`.

=====  ====================  ========
mode   tokens                features
=====  ====================  ========
1d     full                  full
2d     row                   col
2.5d   depth, then row       col
3d     weight, then input    output
=====  ====================  ========

In 1D tp shards the features between a column-parallel layer and the row-parallel layer after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from colossal._src import comm
from colossal._src.cluster import Axis, ParallelMesh, TensorParallelMode, ambient_mesh
from colossal._src.comm import chunk_bounds
from colossal._src.tensor import Layout
from colossal.errors import MeshError


@final
@dataclass(frozen=True)
class TPSharding:
    """Which axes of the mesh shard what."""

    tokens: tuple[Axis, ...] = ()  # the axes that shard the first dimension of an activation, the outermost first
    features: tuple[Axis, ...] = ()  # the axes that shard the last dimension
    vocabulary: tuple[Axis, ...] = ()  # the axes that shard the rows of an embedding table
    replica_axes: tuple[Axis, ...] = ()  # the axes along which a weight is the same on all ranks

    @property
    def inner(self) -> tuple[Axis, ...]:
        """The axes that shard a weight a second time, and along which it is gathered for use."""
        return tuple(axis for axis in self.tokens if axis not in self.replica_axes)


TP_SHARDINGS: dict[TensorParallelMode | None, TPSharding] = {
    None: TPSharding(),
    "1d": TPSharding(vocabulary=("tp",)),
    "2d": TPSharding(("row",), ("col",), ("row",)),
    "2.5d": TPSharding(("depth", "row"), ("col",), ("row",), ("depth",)),
    "3d": TPSharding(("weight", "input"), ("output",), ("input", "weight")),
}
"""The arrangement of each mode; that of None is one rank's."""


def find_mesh(mesh: ParallelMesh | None, mode: TensorParallelMode | None = None) -> ParallelMesh | None:
    """Find the mesh that a layer is made for."""
    mesh = mesh or ambient_mesh()
    # With one rank layers take the path without a mesh, which has no collectives.
    found = None if mesh is None or (mesh.tp_mode == "1d" and mesh.size("tp") == 1) else mesh
    if mode is not None and (mesh is None or mesh.tp_mode != mode):
        raise MeshError(
            f"This layer needs a tp axis that is arranged as {mode}. Found {mesh or 'no mesh'}. Build it inside of "
            f"ParallelMesh(tp=..., tp_mode={mode!r}), or use the layer of the same name without a mode."
        )
    return found


def tp_sharding_of(mesh: ParallelMesh | None) -> TPSharding:
    """Find the arrangement of a mesh."""
    return TP_SHARDINGS[mesh and mesh.tp_mode]


def make_layout(
    mesh: ParallelMesh | None,
    shape: Sequence[int],
    dims: Mapping[int, tuple[Axis, ...]],
    groups: Mapping[int, Sequence[int]] | None = None,
) -> Layout:
    """Make the layout of a tensor on the tp axis."""
    packed = tuple(tuple((groups or {}).get(dim, (length,))) for dim, length in enumerate(shape))
    if mesh is None:
        return Layout(tuple(shape), groups=packed)
    axes = tuple(mesh.grid)
    numbers = tuple(tuple(axes.index(axis) for axis in dims.get(dim, ())) for dim in range(len(shape)))
    return Layout(tuple(shape), mesh.ranks(*axes), tuple(mesh.grid.values()), numbers, groups=packed, axes=axes)


def local_length(length: int, axes: Sequence[Axis], mesh: ParallelMesh | None) -> int:
    """The local length of a dimension that some axes shard."""
    for axis in axes:
        assert mesh is not None
        length = chunk_bounds(length, mesh.size(axis), mesh.rank(axis))[1]
    return length


def packed_row_sizes(length: int, mesh: ParallelMesh | None) -> tuple[int, ...]:
    """Lengths of the blocks that the layout of a weight packs into its rows."""
    if mesh is None or mesh.tp_mode != "3d":
        return (length,)
    q = mesh.size("output")
    return tuple(chunk_bounds(length, q, block)[1] for block in range(q))


def gather_param(
    tensor: torch.Tensor,
    dim: int,
    length: int,
    axes: tuple[Sequence[Axis], Sequence[Axis]],
    mesh: ParallelMesh | None,
) -> torch.Tensor:
    """Gather a parameter along those of its axes whose ranks use the same elements, for other tokens.

    It sends as much as summing the gradients of replicas would, and no rank keeps a replica.

    Communication: all_gather, the second axes, the result's bytes; backward reduce_scatter, the same.
    """
    kept, inner = axes
    # The innermost axis first, as the length that a gather makes is what the outer axes leave.
    for i in reversed(range(len(inner))):
        full_length = local_length(length, (*kept, *inner[:i]), mesh)
        tensor = comm.gather(tensor, inner[i], dim, mesh, partial_grad=True, length=full_length)
    return tensor


def sum_grad_over(tensor: torch.Tensor, axes: Sequence[Axis], mesh: ParallelMesh | None) -> torch.Tensor:
    """Use a parameter that is the same along some axes, whose ranks have different tokens.

    Communication: none forward; backward all_reduce, the axes, the tensor's bytes.
    """
    for axis in axes:
        tensor = comm.replicate(tensor, axis, mesh)
    return tensor


def all_reduce_fwd_bwd(tensor: torch.Tensor, axes: Sequence[Axis], mesh: ParallelMesh | None) -> torch.Tensor:
    """Sum over some axes what each rank goes on to use in its own way.

    Communication: all_reduce, the axes, the tensor's bytes; backward the same.
    """
    for axis in axes:
        tensor = comm.replicate(comm.reduce(tensor, axis, mesh), axis, mesh)
    return tensor
