"""A product of matrices on a 3D grid of ranks.

On q x q x q ranks (i, j, l) along the axes weight, input and output, X W^T with X of m x k and W of n x k lies so:

======  =======================================  =====================================================
matrix  rows                                     columns
======  =======================================  =====================================================
X       cut by i, each part of it by j           cut by l
W       cut into q pieces, each by j and then i  cut by l
X W^T   cut by i, each part of it by j           cut by l
======  =======================================  =====================================================

X is gathered along j and W along i; the product of a rank has columns of every piece of W. The summands of piece l go
to rank l, whose part along j is then exchanged for rows. In the paper the pieces are one and the last step is left out:
a result has its axes swapped, and what takes it must know. Here every product takes what any other gave, for one more
collective of 1 / q of the size of the one before.

Source: Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021,
https://arxiv.org/abs/2105.14450.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch

from colossal.cluster import Axis, ParallelMesh, current_mesh
from colossal.comm.channel import Channel, chunk_bounds, pad_dim
from colossal.comm.ops import all_to_all, gather, reduce_scatter
from colossal.errors import MeshError, ShapeError


def matmul_3d(
    x: torch.Tensor, weight: torch.Tensor, out_features: int, mesh: ParallelMesh | None = None
) -> torch.Tensor:
    """Multiply X and the transposed W on a 3D grid.

    Args:
        x: This rank's block of X, (m / q^2, ..., k / q); dimensions between belong to the rows, and are not cut.
        weight: This rank's block of W, (n / q^2, k / q), whose rows are packed as above: they are as many on all ranks
            if n divides by q^3.
        out_features: The length of n in the whole matrices, which are cut as `torch.chunk` cuts.
        mesh: A mesh whose tp axis is a 3D grid; the ambient one by default.

    Returns:
        This rank's block of X W^T, (m / q^2, ..., n / q).

    Raises:
        MeshError: The tp axis is no such grid.
        ShapeError: The blocks do not fit each other, or `out_features`.

    Communication: all_gather, input, X's bytes times q, and 8 bytes for each rank; all_gather, weight, W's bytes times
    q; reduce_scatter, output, the result's bytes times q; all_to_all, input, the result's bytes. Backward the same but
    for the 8 bytes, each the other way.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.comm import matmul_3d
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=8, tp_mode="3d"):
        ...         return matmul_3d(torch.ones(1, 2), torch.ones(2, 2), out_features=8).tolist()
        >>> run_threads(program, 8)[0]
        [[4.0, 4.0, 4.0, 4.0]]
    """
    mesh = mesh or current_mesh()
    pieces = gather_packed_rows(weight, out_features, mesh)
    if x.dim() < 2 or x.shape[-1] != weight.shape[1]:  # noqa: PLR2004 (a matrix)
        raise ShapeError(
            f"Blocks of matrices must fit each other. Found {tuple(x.shape)} and {tuple(weight.shape)}, whose columns "
            "differ. Cut both as torch.chunk does."
        )
    rows = gather(x, "input", 0, mesh, partial_grad=True, length=sum(Channel("input", mesh).lengths(x.shape[0])))
    longest = max(piece.shape[0] for piece in pieces)
    summands = torch.stack([pad_dim(rows @ piece.mT, -1, longest) for piece in pieces])
    part = reduce_scatter(summands, "output", 0, mesh)[0]
    q, place = mesh.size("output"), mesh.rank("output")
    part = part.narrow(-1, 0, pieces[place].shape[0])
    return all_to_all(part, "input", 0, -1, mesh, join_length=chunk_bounds(out_features, q, place)[1])


def gather_packed_rows(weight: torch.Tensor, num_rows: int, mesh: ParallelMesh | None = None) -> list[torch.Tensor]:
    """Gather, along the axis weight of a 3D grid, rows that are packed as those of W.

    Args:
        weight: This rank's rows; any further dimensions.
        num_rows: Their number on all ranks.
        mesh: A mesh whose tp axis is a 3D grid; the ambient one by default.

    Returns:
        For each of the q pieces, the part of its rows that belongs to this rank's index on the axis input.

    Raises:
        MeshError: The tp axis is no such grid.
        ShapeError: This rank has not that many rows.

    Communication: all_gather, weight, the rows' bytes times q; backward reduce_scatter, weight, the same.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.comm import gather_packed_rows
        >>> from colossal.testing import fake_world
        >>> with fake_world(1), ParallelMesh(tp=1, tp_mode="3d"):
        ...     gather_packed_rows(torch.ones(3, 1), 3)[0].shape
        torch.Size([3, 1])
    """
    mesh = mesh or current_mesh()
    if mesh.tp_mode != "3d":
        raise MeshError(
            f"This product needs a 3D grid of ranks. Found {mesh}. Make it with ParallelMesh(tp=..., tp_mode='3d')."
        )
    axis: Axis = "weight"
    q = mesh.size(axis)
    lengths = [chunk_bounds(chunk_bounds(num_rows, q, piece)[1], q, mesh.rank("input"))[1] for piece in range(q)]
    own = [chunk_bounds(length, q, mesh.rank(axis))[1] for length in lengths]
    if sum(own) != weight.shape[0]:
        raise ShapeError(
            f"Of {num_rows} rows that are packed for {q} x {q} x {q} ranks, this one has {sum(own)}. Found "
            f"{weight.shape[0]}. Cut them as the table of colossal.comm.matmul3d says."
        )
    padded = [-(-length // q) for length in lengths]
    parts = [pad_dim(part, 0, most) for part, most in zip(weight.split(own), padded, strict=True)]
    gathered = gather(torch.cat(parts), axis, 0, mesh, partial_grad=True)
    by_rank = [rows.split(padded) for rows in gathered.chunk(q)]
    return [torch.cat([rows[piece] for rows in by_rank])[:length] for piece, length in enumerate(lengths)]
