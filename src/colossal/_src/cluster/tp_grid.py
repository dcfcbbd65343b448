"""The tp axis as a grid of two or three dimensions.

=====  ==================  ======================  ====================================================================
mode   ranks               axes, outermost first   what is sharded
=====  ==================  ======================  ====================================================================
1d     any number          tp                      weights; each rank has all activations
2d     q x q               row, col                weights and activations, both into q x q blocks
2.5d   depth x q x q       depth, row, col         as in 2D; also, each of the depth layers has its own tokens
3d     q x q x q           weight, input, output   weights, inputs and outputs, each by all three axes
=====  ==================  ======================  ====================================================================

The index on `row` says which row of blocks a rank holds, so ranks along `row` are above each other. The axes of 3D are
named after what is gathered along them: weights and inputs, or summed up: outputs.

Source: Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models", 2021,
https://arxiv.org/abs/2104.05343; Wang et al., "2.5-dimensional Distributed Model Training", 2021,
https://arxiv.org/abs/2105.14500; Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural
Networks", 2021, https://arxiv.org/abs/2105.14450.
"""

from typing import Literal, get_args

from colossal._src.cluster.axes import Axis
from colossal.errors import MeshError

TensorParallelMode = Literal["1d", "2d", "2.5d", "3d"]
"""The shapes that the tp axis can have."""

TENSOR_PARALLEL_MODES: tuple[TensorParallelMode, ...] = get_args(TensorParallelMode)
"""Their names."""


def make_tp_grid(tp: int, mode: TensorParallelMode = "1d", depth: int | None = None) -> dict[Axis, int]:
    """Arrange the ranks of the tp axis.

    Args:
        tp: Their number.
        mode: ``"1d"``, ``"2d"``, ``"2.5d"`` or ``"3d"``.
        depth: The number of layers of a 2.5D grid; only there, and needed there.

    Returns:
        The size of each axis of the grid, outermost first.

    Raises:
        MeshError: There is no such mode, or that many ranks do not make such a grid; it names the nearest ones that do.

    Example:
        >>> from colossal.cluster import make_tp_grid
        >>> make_tp_grid(8, "2.5d", depth=2)
        {'depth': 2, 'row': 2, 'col': 2}
        >>> make_tp_grid(27, "3d")
        {'weight': 3, 'input': 3, 'output': 3}
    """
    if mode not in TENSOR_PARALLEL_MODES:
        raise MeshError(
            f"The tp axis is arranged as one of {', '.join(TENSOR_PARALLEL_MODES)}. Found tp_mode={mode!r}. "
            "Pass one of them."
        )
    if (depth is not None) != (mode == "2.5d"):
        fitting = [f"{d} ({d} x {q} x {q})" for q in range(1, tp + 1) for d in [tp // q**2] if tp == d * q**2]
        raise MeshError(
            f"A depth belongs to the mode 2.5d, and that needs one. Found tp_mode={mode!r} with tp_depth={depth}. "
            f"Leave tp_depth out, or pass tp_mode='2.5d' and for tp={tp} the depth {' or '.join(fitting)}."
        )
    if mode == "1d":
        return {"tp": tp}
    if mode == "3d":
        q = _side(tp, 1, 3, mode)
        return {"weight": q, "input": q, "output": q}
    if depth is None:
        q = _side(tp, 1, 2, mode)
        return {"row": q, "col": q}
    if not isinstance(depth, int) or depth < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError(f"The depth of a 2.5D grid is an integer, at least 1. Found {depth!r}. Pass 1 or more.")
    q = _side(tp, depth, 2, mode)
    return {"depth": depth, "row": q, "col": q}


def _side(tp: int, depth: int, power: int, mode: str) -> int:
    """Return q with depth times q to this power equal to tp."""
    below = 1
    while depth * (below + 1) ** power <= tp:
        below += 1
    if depth * below**power == tp:
        return below
    nearest = [(depth * q**power, q) for q in (below, below + 1)]
    layers = f"{depth} x " if mode == "2.5d" else ""
    needed = layers + " x ".join(["q"] * power)
    choices = " or ".join(f"tp={size} ({needed.replace('q', str(q))})" for size, q in nearest)
    raise MeshError(f"The mode {mode} needs {needed} ranks. Found tp={tp}. Pass {choices}.")
