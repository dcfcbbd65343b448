"""Products of matrices that are sharded into blocks on a 2D grid of ranks, or on the layers of a 2.5D one.

Rank (i, j) of a grid of q x q holds block (i, j) of each matrix. Each product takes q rounds. In round t one panel
of blocks is broadcast along the rows or columns of the grid and multiplied:

========  ==============================================  ====================================================
product   broadcast in round t                            what becomes of the product
========  ==============================================  ====================================================
A B       A[i, t] to its row, B[t, j] to its column       it is added to C[i, j]
A B^T     B[t, j] to its column                           it is summed up over the row, for C[i, t]
A^T B     A[i, t] to its row                              it is summed up over the column, for C[t, j]
========  ==============================================  ====================================================

The gradients of each of the three are the other two. The panels of the next round travel while those of this round are
multiplied, so there are two of each at most, and never a full matrix.

Source: van de Geijn, Watts, "SUMMA: Scalable Universal Matrix Multiplication Algorithm", 1997; Xu et al., "An Efficient
2D Method for Training Super-Large Deep Learning Models", 2021, https://arxiv.org/abs/2104.05343.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.comm.channel import Channel, chunk_bounds
from colossal._src.comm.lost_peers import LostPeerGuard
from colossal.errors import MeshError, ShapeError

_Kind = Literal["ab", "abt", "atb"]
_Pending = tuple[torch.Tensor, dist.Work | None]


def summa_ab(a: torch.Tensor, b: torch.Tensor, inner: int, mesh: ParallelMesh | None = None) -> torch.Tensor:
    """Multiply A and B on the grid.

    Args:
        a: This rank's block of A, (m, k).
        b: This rank's block of B, (k, n).
        inner: The length of k in the full matrices, which are split as by `torch.chunk`.
        mesh: A mesh whose tp axis is a 2D or 2.5D grid; the ambient one by default.

    Returns:
        This rank's block of A B, (m, n).

    Raises:
        MeshError: The tp axis is no such grid.
        ShapeError: The blocks are not those of `inner`.

    Communication: broadcast, col, the row of blocks of A; broadcast, row, the column of blocks of B. Backward those of
    `summa_abt` and `summa_atb`.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.comm import summa_ab
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     with ParallelMesh(tp=4, tp_mode="2d"):
        ...         return summa_ab(torch.ones(1, 3), torch.ones(3, 1), inner=6).item()
        >>> run_threads(program, 4)
        [6.0, 6.0, 6.0, 6.0]
    """
    return _multiply("ab", a, b, inner, mesh)


def summa_abt(a: torch.Tensor, b: torch.Tensor, outer: int, mesh: ParallelMesh | None = None) -> torch.Tensor:
    """Multiply A and the transposed B on the grid.

    Args:
        a: This rank's block of A, (m, k).
        b: This rank's block of B, (n, k).
        outer: The length of n in the full matrices.
        mesh: A mesh whose tp axis is a 2D or 2.5D grid; the ambient one by default.

    Returns:
        This rank's block of A B^T, (m, n).

    Raises:
        MeshError: The tp axis is no such grid.
        ShapeError: The blocks are not those of `outer`.

    Communication: broadcast, row, the column of blocks of B; reduce, col, the row of blocks of the result. Backward
    those of `summa_ab` and `summa_atb`.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.comm import summa_abt
        >>> from colossal.testing import fake_world
        >>> with fake_world(1), ParallelMesh(tp=1, tp_mode="2d"):
        ...     summa_abt(torch.ones(1, 3), torch.ones(2, 3), outer=2).tolist()
        [[3.0, 3.0]]
    """
    return _multiply("abt", a, b, outer, mesh)


def summa_atb(a: torch.Tensor, b: torch.Tensor, outer: int, mesh: ParallelMesh | None = None) -> torch.Tensor:
    """Multiply the transposed A and B on the grid.

    Args:
        a: This rank's block of A, (k, m).
        b: This rank's block of B, (k, n).
        outer: The length of m in the full matrices.
        mesh: A mesh whose tp axis is a 2D or 2.5D grid; the ambient one by default.

    Returns:
        This rank's block of A^T B, (m, n).

    Raises:
        MeshError: The tp axis is no such grid.
        ShapeError: The blocks are not those of `outer`.

    Communication: broadcast, col, the row of blocks of A; reduce, row, the column of blocks of the result. Backward
    those of `summa_abt` and `summa_ab`.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.comm import summa_atb
        >>> from colossal.testing import fake_world
        >>> with fake_world(1), ParallelMesh(tp=1, tp_mode="2d"):
        ...     summa_atb(torch.ones(3, 1), torch.ones(3, 2), outer=1).tolist()
        [[3.0, 3.0]]
    """
    return _multiply("atb", a, b, outer, mesh)


class _Grid:
    """The two axes of the grid, and the length of a dimension that is sharded over them."""

    def __init__(self, mesh: ParallelMesh, length: int) -> None:
        if mesh.tp_mode not in ("2d", "2.5d"):
            raise MeshError(
                f"SUMMA needs a 2D or 2.5D grid of ranks. Found {mesh}. "
                "Make it with ParallelMesh(tp=..., tp_mode='2d'), or '2.5d' and tp_depth."
            )
        self.row, self.col, self.size = Channel("row", mesh), Channel("col", mesh), mesh.size("row")
        self._length = length

    def part(self, index: int) -> int:
        """Return the length of a part of the dimension."""
        return chunk_bounds(self._length, self.size, index)[1]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, kind: _Kind, grid: _Grid) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.kind, ctx.grid = kind, grid
        return _PRODUCTS[kind](a.contiguous(), b.contiguous(), grid)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        operands = {"a": a, "b": b, "c": grads[0]}
        results = [
            _Product.apply(operands[left], operands[right], kind, ctx.grid) if needed else None
            # `needs_input_grad` also has the kind and the grid, which `zip` leaves out.
            for needed, (kind, left, right) in zip(ctx.needs_input_grad, _GRADIENTS[ctx.kind], strict=False)
        ]
        return *results, None, None


_GRADIENTS: dict[_Kind, tuple[tuple[_Kind, str, str], tuple[_Kind, str, str]]] = {
    "ab": (("abt", "c", "b"), ("atb", "a", "c")),
    "abt": (("ab", "c", "b"), ("atb", "c", "a")),
    "atb": (("abt", "b", "c"), ("ab", "a", "c")),
}
"""The gradients of both operands, by the gradient c of the product."""


def _multiply(kind: _Kind, a: torch.Tensor, b: torch.Tensor, length: int, mesh: ParallelMesh | None) -> torch.Tensor:
    grid = _Grid(mesh or current_mesh(), length)
    _check_blocks(kind, a, b, grid)
    device = a.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # as in torch's own products
        dtype = torch.get_autocast_dtype(device)
        a, b = a.to(dtype), b.to(dtype)
    return cast(torch.Tensor, _Product.apply(a, b, kind, grid))


def _check_blocks(kind: _Kind, a: torch.Tensor, b: torch.Tensor, grid: _Grid) -> None:
    along_row, along_col = grid.part(grid.row.rank), grid.part(grid.col.rank)
    needed = {
        "ab": (a.shape[-1] == along_col, b.shape[0] == along_row),
        "abt": (b.shape[0] == along_row, a.shape[-1] == b.shape[-1]),
        "atb": (a.shape[-1] == along_col, a.shape[0] == b.shape[0]),
    }[kind]
    if a.dim() != 2 or b.dim() != 2 or not all(needed):  # noqa: PLR2004 (matrices)
        raise ShapeError(
            f"Blocks of matrices must fit each other, and the full length. On row {grid.row.rank}, column "
            f"{grid.col.rank} of the grid, a block has {along_row} and {along_col} of its elements. Found "
            f"{tuple(a.shape)} and {tuple(b.shape)} for {kind}. Split both as torch.chunk does."
        )


def _pipelined_rounds(size: int, start: Callable[[int], list[_Pending]], use: Callable[..., None]) -> None:
    """Call `use` with the turn and the panels of each round; those of the next one are on their way meanwhile."""
    ahead = start(0)
    for turn in range(size):
        panels, ahead = ahead, start(turn + 1) if turn + 1 < size else []
        use(turn, *map(_wait_for, panels))
        del panels  # before those after the next are made


def _panel(block: torch.Tensor, shape: tuple[int, int], channel: Channel, source: int) -> _Pending:
    # Every rank starts the broadcasts of all rounds in one order; the source sends its block without a copy.
    panel = block if channel.rank == source else block.new_empty(shape)
    return panel, channel.start_broadcast(panel, source)


def _wait_for(pending: _Pending) -> torch.Tensor:
    tensor, work = pending
    if work is not None:
        with LostPeerGuard():
            work.wait()
    return tensor


class _RoundSums:
    """Sums each round's product up for the rank whose turn it is, while the next one is computed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pending: _Pending | None = None
        self._own: torch.Tensor | None = None

    def add(self, turn: int, product: torch.Tensor) -> None:
        """Begin to sum up a product."""
        # One sum is under way at a time, so that products do not pile up in memory.
        self._settle()
        self._pending = product, self._channel.start_reduce(product, turn)
        # The sum is taken in place: the products of other turns are used up.
        if turn == self._channel.rank:
            self._own = product

    def own(self) -> torch.Tensor:
        """Return the sum that is for this rank, once all are over."""
        self._settle()
        assert self._own is not None
        return self._own

    def _settle(self) -> None:
        if self._pending is not None:
            _wait_for(self._pending)
            self._pending = None


def _ab(a: torch.Tensor, b: torch.Tensor, grid: _Grid) -> torch.Tensor:
    result = a.new_zeros(a.shape[0], b.shape[1])

    def start(turn: int) -> list[_Pending]:
        length = grid.part(turn)
        return [_panel(a, (a.shape[0], length), grid.col, turn), _panel(b, (length, b.shape[1]), grid.row, turn)]

    def use(_turn: int, left: torch.Tensor, right: torch.Tensor) -> None:
        torch.addmm(result, left, right, out=result)

    _pipelined_rounds(grid.size, start, use)
    return result


def _abt(a: torch.Tensor, b: torch.Tensor, grid: _Grid) -> torch.Tensor:
    sums = _RoundSums(grid.col)

    def use(turn: int, panel: torch.Tensor) -> None:
        sums.add(turn, a @ panel.mT)

    _pipelined_rounds(grid.size, lambda turn: [_panel(b, (grid.part(turn), b.shape[1]), grid.row, turn)], use)
    return sums.own()


def _atb(a: torch.Tensor, b: torch.Tensor, grid: _Grid) -> torch.Tensor:
    sums = _RoundSums(grid.row)

    def use(turn: int, panel: torch.Tensor) -> None:
        sums.add(turn, panel.mT @ b)

    _pipelined_rounds(grid.size, lambda turn: [_panel(a, (a.shape[0], grid.part(turn)), grid.col, turn)], use)
    return sums.own()


_PRODUCTS: dict[_Kind, Callable[[torch.Tensor, torch.Tensor, _Grid], torch.Tensor]] = {
    "ab": _ab,
    "abt": _abt,
    "atb": _atb,
}
