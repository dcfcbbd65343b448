"""Layouts that hypothesis draws, and all layouts of a grid."""

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from colossal.tensor import Layout, one_step_layouts

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def layouts(
    draw: st.DrawFn,
    shape: tuple[int, ...] | None = None,
    grid: tuple[int, ...] | None = None,
    *,
    is_packed: bool = False,
    is_partial: bool = False,
) -> Layout:
    """Any layout on up to 27 ranks, whose numbers are not their places."""
    shape = draw(SIZES) if shape is None else shape
    grid = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))) if grid is None else grid
    dims: list[list[int]] = [[] for _ in shape]
    partial = []
    for axis in draw(st.permutations(range(len(grid)))):
        role = draw(st.integers(-1 - is_partial, len(shape) - 1))
        if role >= 0:
            dims[role].append(axis)
        elif role < -1:
            partial.append(axis)
    groups = tuple(draw(cuts(length)) if is_packed else (length,) for length in shape)
    ranks = draw(st.permutations(range(math.prod(grid))))
    return Layout(shape, tuple(10 * rank for rank in ranks), grid, tuple(map(tuple, dims)), tuple(partial), groups)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """Lengths that add up."""
    at = sorted(draw(st.lists(st.integers(0, length), max_size=2)))
    return tuple(end - begin for begin, end in zip([0, *at], [*at, length], strict=True))


def all_layouts(shape: Sequence[int], grid: Sequence[int], partial: Sequence[int] = ()) -> list[Layout]:
    """Every layout that can be reached from the one with these partial sums."""
    found = {Layout(tuple(shape), grid=tuple(grid), partial=tuple(partial)): None}
    waiting = list(found)
    while waiting:
        for _, layout in one_step_layouts(waiting.pop()):
            if layout not in found:
                found[layout] = None
                waiting.append(layout)
    return list(found)
