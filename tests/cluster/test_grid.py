import itertools

import pytest
from torch import distributed as dist

from colossal.cluster import ParallelMesh, make_tp_grid
from colossal.errors import MeshError
from colossal.testing import fake_world

GRIDS = [(6, "1d", None), (4, "2d", None), (9, "2d", None), (8, "2.5d", 2), (12, "2.5d", 3), (8, "3d", None)]


@pytest.mark.parametrize(("tp", "mode", "depth"), GRIDS)
@pytest.mark.parametrize("dp", [1, 2])
def test_the_axes_of_the_grid_are_views_of_the_tp_axis(tp, mode, depth, dp) -> None:
    sizes = make_tp_grid(tp, mode, depth)
    for rank in range(dp * tp):
        with fake_world(dp * tp, rank=rank):
            mesh = ParallelMesh(dp=dp, tp=tp, tp_mode=mode, tp_depth=depth)
            places = list(itertools.product(range(dp), *(range(size) for size in sizes.values())))
            assert (mesh.rank("dp"), *(mesh.rank(axis) for axis in sizes)) == places[rank]
            for axis, size in sizes.items():
                ranks = mesh.ranks(axis)
                assert len(ranks) == size == mesh.size(axis) == dist.get_world_size(mesh.group(axis))
                assert ranks[mesh.rank(axis)] == rank
                assert set(ranks) <= set(mesh.ranks("tp"))
            assert mesh.ranks(*sizes) == mesh.ranks("tp")
            assert mesh.ranks("dp", "tp") == tuple(range(dp * tp))


def test_ranks_are_listed_in_the_order_of_the_axes() -> None:
    with fake_world(8, rank=5):
        mesh = ParallelMesh(tp=8, tp_mode="2.5d", tp_depth=2)
        assert mesh.ranks("row", "col") == (4, 5, 6, 7)
        assert mesh.ranks("col", "row") == (4, 6, 5, 7)
        assert mesh.ranks("depth") == (1, 5)
        assert str(mesh) == "ParallelMesh(pp=1, dp=1, sp=1, tp=8, tp_mode='2.5d', tp_depth=2)"


@pytest.mark.parametrize(
    ("tp", "mode", "depth", "words"),
    [
        (6, "2d", None, r"2d needs q x q ranks. Found tp=6. Pass tp=4 \(2 x 2\) or tp=9 \(3 x 3\)"),
        (6, "2.5d", 2, r"2.5d needs 2 x q x q ranks. Found tp=6. Pass tp=2 \(2 x 1 x 1\) or tp=8 \(2 x 2 x 2\)"),
        (9, "3d", None, r"3d needs q x q x q ranks. Found tp=9. Pass tp=8 \(2 x 2 x 2\) or tp=27 \(3 x 3 x 3\)"),
        (8, "2.5d", None, r"tp_depth=None. .* for tp=8 the depth 8 \(8 x 1 x 1\) or 2 \(2 x 2 x 2\)"),
        (4, "2d", 2, "Found tp_mode='2d' with tp_depth=2"),
        (8, "2.5d", 0, "at least 1. Found 0"),
        (4, "4d", None, "1d, 2d, 2.5d, 3d. Found tp_mode='4d'"),
    ],
)
def test_what_makes_no_grid_is_refused_with_what_does(tp, mode, depth, words) -> None:
    with fake_world(tp), pytest.raises(MeshError, match=words):
        ParallelMesh(tp=tp, tp_mode=mode, tp_depth=depth)


def test_an_axis_of_another_mode_is_refused() -> None:
    with fake_world(4), pytest.raises(MeshError, match=r"pp, dp, sp, tp, row, col, edp, ep\. Found 'depth'"):
        ParallelMesh(tp=4, tp_mode="2d").size("depth")
