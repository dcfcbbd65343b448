"""Sums, quotients and projections of shards make up those of the full tensor, wherever it is split."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import draw

from colossal._src.nn.optimizer.factored import (
    divide_by_roots,
    factor_shapes,
    row_and_column_sums,
    run_with_batched_sums,
)
from colossal._src.nn.optimizer.galore import Projection
from colossal.tensor import FlatLayout, Layout, Placement

SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)


def dtensor_placements(shape: tuple[int, ...], points: list[int]) -> list[tuple[Placement, slice]]:
    numel = torch.Size(shape).numel()
    ends = [0, *sorted(point % (numel + 1) for point in points), numel]
    ranges = list(pairwise(ends))
    layout = FlatLayout(shape, tuple(range(len(ranges))), tuple(ranges))
    return [(Placement(Layout(shape), rank=i, flat=layout), slice(*range_)) for i, range_ in enumerate(ranges)]


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, points=st.lists(st.integers(0, 700), max_size=3), seed=st.integers(0, 99))
def test_shards_add_up(shape: tuple[int, ...], points: list[int], seed: int) -> None:
    whole, placed = draw(shape, seed), dtensor_placements(shape, points)
    flat = whole.flatten()
    sums = [row_and_column_sums(placement, flat[part]) for placement, part in placed]
    rows, columns = (sum(each) for each in zip(*sums, strict=True))
    torch.testing.assert_close(rows, (whole**2).sum(-1))
    torch.testing.assert_close(columns, (whole**2).sum(-2))
    shapes = factor_shapes(placed[0][0])
    factors = draw(shapes[0], 1).abs() + 1, draw(shapes[1], 2).abs() + 1
    quotients = torch.cat([divide_by_roots(placement, flat[part], factors) for placement, part in placed]).view(shape)
    estimate = factors[0][..., None] * factors[1][..., None, :] / factors[0].mean(-1)[..., None, None]
    torch.testing.assert_close(quotients, whole / estimate.sqrt())


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    points=st.lists(st.integers(0, 40), max_size=3),
    proj_type=st.sampled_from(["std", "reverse_std", "left", "right", "full"]),
    rank=st.integers(1, 4),
)
def test_projections_of_shards_add_up(shape: tuple[int, int], points: list[int], proj_type: str, rank: int) -> None:
    whole = draw(shape, 3)
    projection = Projection.of(whole, rank, proj_type)
    for side in (projection.left, projection.right):
        if side is not None:
            square = side.T @ side if side is projection.left else side @ side.T
            torch.testing.assert_close(square, torch.eye(len(square), dtype=whole.dtype))
    flat, placed = whole.flatten(), dtensor_placements(shape, points)
    low = sum(projection.project(placement, flat[part]) for placement, part in placed)
    assert isinstance(low, torch.Tensor)
    left = torch.eye(shape[0], dtype=whole.dtype) if projection.left is None else projection.left
    right = torch.eye(shape[1], dtype=whole.dtype) if projection.right is None else projection.right
    torch.testing.assert_close(low, left.T @ whole @ right.T)
    back = torch.cat([projection.project_back(placement, low, flat[part]) for placement, part in placed]).view(shape)
    torch.testing.assert_close(back, left @ low @ right)
    if rank >= min(shape):
        torch.testing.assert_close(back, whole)


def test_updates_of_whole_parameters_run_one_after_another() -> None:
    order = []

    def update(name: str):  # noqa: ANN202
        order.append(f"{name} begins")
        (total,) = yield [torch.ones(2)]
        order.append(f"{name} has {total.tolist()}")
        nothing = yield []
        assert nothing == []

    whole = Placement.full((2,))
    run_with_batched_sums([(whole, update("first")), (whole, update("second"))])
    assert order == ["first begins", "first has [1.0, 1.0]", "second begins", "second has [1.0, 1.0]"]
