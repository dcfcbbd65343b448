"""A product of matrices on a 3D grid of ranks.

On q x q x q ranks (i, j, l) along the axes weight, input and output, X of m x k, W of n x k and X W^T are sharded so:

======  ===========================================  ===============
matrix  rows                                         columns
======  ===========================================  ===============
X       sharded over i, then over j                  sharded over l
W       split into q blocks, each over j and then i  sharded over l
X W^T   sharded over i, then over j                  sharded over l
======  ===========================================  ===============

X is gathered along j and W along i; the product on a rank has columns of every block of W. The partial sums of block l
are reduced to rank l, where an all-to-all along j then shards the rows instead of the columns. In the paper W has one
block and there is no all-to-all: a result has its axes swapped, and the next layer must account for it. Here each
product accepts the result of any other, for one more collective of 1 / q of the size of the one before.

Source: Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021,
https://arxiv.org/abs/2105.14450.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import torch

from colossal._src.cluster import Axis, ParallelMesh, current_mesh
from colossal._src.comm.channel import Channel, chunk_bounds, pad_dim
from colossal._src.comm.ops import all_to_all, gather, reduce_scatter
from colossal.errors import MeshError, ShapeError


def matmul_3d(
    x: torch.Tensor, weight: torch.Tensor, out_features: int, mesh: ParallelMesh | None = None
) -> torch.Tensor:
    """Multiply X and the transposed W on a 3D grid.

    Args:
        x: This rank's block of X, (m / q^2, ..., k / q); dimensions between belong to the rows, and are not sharded.
        weight: This rank's block of W, (n / q^2, k / q), whose rows are packed as above: they are as many on all ranks
            if n divides by q^3.
        out_features: The length of n in the full matrices, which are split as by `torch.chunk`.
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
    blocks = gather_packed_rows(weight, out_features, mesh)
    if x.dim() < 2 or x.shape[-1] != weight.shape[1]:  # noqa: PLR2004 (a matrix)
        raise ShapeError(
            f"Blocks of matrices must fit each other. Found {tuple(x.shape)} and {tuple(weight.shape)}, whose columns "
            "differ. Split both as torch.chunk does."
        )
    # The ranks along the axis multiply X by different rows of W, so each has a partial sum of its gradient only.
    rows = gather(x, "input", 0, mesh, partial_grad=True, length=sum(Channel("input", mesh).lengths(x.shape[0])))
    # Blocks of one length can be stacked, so that one reduce-scatter sends block l to rank l.
    longest = max(block.shape[0] for block in blocks)
    partial_sums = torch.stack([pad_dim(rows @ block.mT, -1, longest) for block in blocks])
    columns = reduce_scatter(partial_sums, "output", 0, mesh)[0]
    q, rank = mesh.size("output"), mesh.rank("output")
    columns = columns.narrow(-1, 0, blocks[rank].shape[0])
    return all_to_all(columns, "input", 0, -1, mesh, join_length=chunk_bounds(out_features, q, rank)[1])


def gather_packed_rows(weight: torch.Tensor, num_rows: int, mesh: ParallelMesh | None = None) -> list[torch.Tensor]:
    """Gather, along the axis weight of a 3D grid, rows that are packed as those of W.

    Communication: all_gather, weight, the rows' bytes times q; backward reduce_scatter, weight, the same.
    """
    mesh = mesh or current_mesh()
    if mesh.tp_mode != "3d":
        raise MeshError(
            f"This product needs a 3D grid of ranks. Found {mesh}. Make it with ParallelMesh(tp=..., tp_mode='3d')."
        )
    axis: Axis = "weight"
    q = mesh.size(axis)
    lengths = [chunk_bounds(chunk_bounds(num_rows, q, block)[1], q, mesh.rank("input"))[1] for block in range(q)]
    own = [chunk_bounds(length, q, mesh.rank(axis))[1] for length in lengths]
    if sum(own) != weight.shape[0]:
        raise ShapeError(
            f"Of {num_rows} rows that are packed for {q} x {q} x {q} ranks, this one has {sum(own)}. Found "
            f"{weight.shape[0]}. Split all rows into "
            f"{q} blocks, and shard each over the axes input and weight, as `colossal.nn.Linear` does."
        )
    padded = [-(-length // q) for length in lengths]
    parts = [pad_dim(part, 0, most) for part, most in zip(weight.split(own), padded, strict=True)]
    gathered = gather(torch.cat(parts), axis, 0, mesh, partial_grad=True)
    by_rank = [rows.split(padded) for rows in gathered.chunk(q)]
    return [torch.cat([rows[block] for rows in by_rank])[:length] for block, length in enumerate(lengths)]
