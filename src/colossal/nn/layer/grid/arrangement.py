"""How activations lie on the ranks of the tp axis, in each of its modes.

An activation has tokens (its first dimension) and features (its last). Which axes cut which of the two is all that
most layers need to know; the products of `colossal.nn.Linear` are in `colossal.nn.layer.grid.product`.

=====  ====================  ========
mode   tokens                features
=====  ====================  ========
1d     whole                 whole
2d     row                   col
2.5d   depth, then row       col
3d     weight, then input    output
=====  ====================  ========

In 1D the features between a column-parallel layer and the row-parallel one behind it are cut by tp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from colossal import comm
from colossal.cluster import Axis, ParallelMesh, TensorParallelMode, ambient_mesh
from colossal.comm.channel import chunk
from colossal.errors import MeshError
from colossal.tensor import Layout


@final
@dataclass(frozen=True)
class Arrangement:
    """Which axes of the mesh cut what.

    Args:
        tokens: The axes that cut the first dimension of an activation, the outermost first.
        features: The axes that cut the last dimension.
        vocabulary: The axes that cut the rows of a table of embeddings.
        copies: The axes along which a weight is the same on all ranks.

    Example:
        >>> from colossal.nn.layer.grid import ARRANGEMENTS, Arrangement
        >>> ARRANGEMENTS["2.5d"].tokens
        ('depth', 'row')
        >>> Arrangement(tokens=("depth", "row"), copies=("depth",)).inner
        ('row',)
    """

    tokens: tuple[Axis, ...] = ()
    features: tuple[Axis, ...] = ()
    vocabulary: tuple[Axis, ...] = ()
    copies: tuple[Axis, ...] = ()

    @property
    def inner(self) -> tuple[Axis, ...]:
        """The axes that cut a weight a second time, and along which it is gathered for use."""
        return tuple(axis for axis in self.tokens if axis not in self.copies)


ARRANGEMENTS: dict[TensorParallelMode | None, Arrangement] = {
    None: Arrangement(),
    "1d": Arrangement(vocabulary=("tp",)),
    "2d": Arrangement(("row",), ("col",), ("row",)),
    "2.5d": Arrangement(("depth", "row"), ("col",), ("row",), ("depth",)),
    "3d": Arrangement(("weight", "input"), ("output",), ("input", "weight")),
}
"""The arrangement of each mode; that of None is one rank's."""


def find_mesh(mesh: ParallelMesh | None, mode: TensorParallelMode | None = None) -> ParallelMesh | None:
    """Find the mesh that a layer is made for.

    Args:
        mesh: The mesh that was asked for; the ambient one by default.
        mode: What its tp axis must be; anything by default.

    Returns:
        The mesh; None where one rank has everything.

    Raises:
        MeshError: The tp axis is not arranged in that mode.

    Example:
        >>> from colossal.nn.layer.grid import find_mesh
        >>> print(find_mesh(None))
        None
    """
    mesh = mesh or ambient_mesh()
    found = None if mesh is None or (mesh.tp_mode == "1d" and mesh.size("tp") == 1) else mesh
    if mode is not None and (mesh is None or mesh.tp_mode != mode):
        raise MeshError(
            f"This layer needs a tp axis that is arranged as {mode}. Found {mesh or 'no mesh'}. Build it inside of "
            f"ParallelMesh(tp=..., tp_mode={mode!r}), or use the layer of the same name without a mode."
        )
    return found


def arrangement_of(mesh: ParallelMesh | None) -> Arrangement:
    """Find the arrangement of a mesh.

    Args:
        mesh: The mesh, or None for one rank that has everything.

    Returns:
        Its arrangement.

    Example:
        >>> from colossal.nn.layer.grid import arrangement_of
        >>> arrangement_of(None)
        Arrangement(tokens=(), features=(), vocabulary=(), copies=())
    """
    return ARRANGEMENTS[mesh and mesh.tp_mode]


def lay(
    mesh: ParallelMesh | None,
    shape: Sequence[int],
    dims: Mapping[int, tuple[Axis, ...]],
    groups: Mapping[int, Sequence[int]] | None = None,
) -> Layout:
    """Make the layout of a tensor on the tp axis.

    Args:
        mesh: The mesh, or None for one rank that has everything.
        shape: The shape of the whole tensor.
        dims: For dimensions that are cut, the axes that cut them, the outermost first.
        groups: For dimensions that are packed, the lengths of the pieces.

    Returns:
        The layout.

    Example:
        >>> from colossal.nn.layer.grid import lay
        >>> print(lay(None, (4, 2), {}))
        RR
    """
    packed = tuple(tuple((groups or {}).get(dim, (length,))) for dim, length in enumerate(shape))
    if mesh is None:
        return Layout(tuple(shape), groups=packed)
    axes = tuple(mesh.grid)
    numbers = tuple(tuple(axes.index(axis) for axis in dims.get(dim, ())) for dim in range(len(shape)))
    return Layout(tuple(shape), mesh.ranks(*axes), tuple(mesh.grid.values()), numbers, groups=packed, axes=axes)


def part_of(length: int, axes: Sequence[Axis], mesh: ParallelMesh | None) -> int:
    """Count what a rank has of a dimension that some axes cut."""
    for axis in axes:
        assert mesh is not None
        length = chunk(length, mesh.size(axis), mesh.rank(axis))[1]
    return length


def row_pieces(length: int, mesh: ParallelMesh | None) -> tuple[int, ...]:
    """Cut the rows of a weight into the pieces that its layout packs."""
    if mesh is None or mesh.tp_mode != "3d":
        return (length,)
    q = mesh.size("output")
    return tuple(chunk(length, q, piece)[1] for piece in range(q))


def regathered(
    tensor: torch.Tensor,
    dim: int,
    length: int,
    axes: tuple[Sequence[Axis], Sequence[Axis]],
    mesh: ParallelMesh | None,
) -> torch.Tensor:
    """Gather a parameter along those of the axes that cut it whose ranks use the same of it, for other tokens.

    It sends what the sum of the gradients of copies would, and no rank keeps a copy.

    Communication: all_gather, the second axes, the result's bytes; backward reduce_scatter, the same.
    """
    kept, inner = axes
    for i in reversed(range(len(inner))):
        whole = part_of(length, (*kept, *inner[:i]), mesh)
        tensor = comm.gather(tensor, inner[i], dim, mesh, partial_grad=True, length=whole)
    return tensor


def shared(tensor: torch.Tensor, axes: Sequence[Axis], mesh: ParallelMesh | None) -> torch.Tensor:
    """Use a parameter that is the same along some axes, whose ranks have different tokens.

    Communication: none forward; backward all_reduce, the axes, the tensor's bytes.
    """
    for axis in axes:
        tensor = comm.replicate(tensor, axis, mesh)
    return tensor


def total(tensor: torch.Tensor, axes: Sequence[Axis], mesh: ParallelMesh | None) -> torch.Tensor:
    """Sum over some axes what each rank goes on to use in its own way.

    Communication: all_reduce, the axes, the tensor's bytes; backward the same.
    """
    for axis in axes:
        tensor = comm.replicate(comm.reduce(tensor, axis, mesh), axis, mesh)
    return tensor
