import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from colossal._src.cluster import AXES
from colossal.cluster import ParallelMesh, current_mesh
from colossal.errors import MeshError
from colossal.testing import fake_world, run_processes, run_threads

small = st.integers(1, 4)


@given(small, small, small, small, st.data())
def test_coordinates_and_ranks_describe_one_grid(pp, dp, sp, tp, data) -> None:
    world = pp * dp * sp * tp
    rank = data.draw(st.integers(0, world - 1))
    with fake_world(world, rank=rank):
        mesh = ParallelMesh(pp=pp, dp=dp, sp=sp, tp=tp)
        numbers = list(itertools.product(range(pp), range(dp), range(sp), range(tp)))
        assert tuple(mesh.coordinate.values()) == numbers[rank]
        for axis in AXES:
            ranks = mesh.ranks(axis)
            assert len(ranks) == mesh.size(axis) == dist.get_world_size(mesh.group(axis))
            assert ranks[mesh.rank(axis)] == rank
            assert list(ranks) == sorted(ranks)


def test_data_parallelism_takes_the_rest_of_the_world() -> None:
    with fake_world(12):
        assert ParallelMesh(tp=2, pp=3).shape == {"pp": 3, "dp": 2, "sp": 1, "tp": 2}


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (6, {"tp": 4}, r"Found pp 1 x sp 1 x tp 4 = 4 in a world of 6\. Change a size, or start 8 processes"),
        (8, {"tp": 2, "dp": 2}, r"Found pp 1 x dp 2 x sp 1 x tp 2 = 4 in a world of 8\. .* start 4 processes"),
        (8, {"tp": 0}, "Found tp=0"),
        (8, {"pp": 2.0}, r"Found pp=2\.0"),
        (8, {"pp": 2, "tp": 2, "ep": 3}, r"the 4 ranks of a stage, those of dp, sp and tp\. Found ep=3\. .* 1, 2, 4\."),
        (8, {"pp": 2, "ep": 8}, r"Found ep=8\. Pass one of 1, 2, 4\."),
        (8, {"ep": 0}, r"Found ep=0\. Pass one of 1, 2, 4, 8\."),
        (8, {"ep": 2.0}, r"Found ep=2\.0\."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(world, sizes, message) -> None:
    with fake_world(world), pytest.raises(MeshError, match=message):
        ParallelMesh(**sizes)


@pytest.mark.parametrize("axes", [("dp", "ep"), ("edp", "tp"), ("pp", "sp", "ep")])
def test_ranks_are_listed_along_axes_of_one_view(axes) -> None:
    with fake_world(8):
        mesh = ParallelMesh(pp=2, tp=2, ep=2)
        assert mesh.ranks("pp", "edp", "ep") == mesh.ranks("pp", "dp", "tp") == tuple(range(8))
        with pytest.raises(MeshError, match="ep and edp arrange the ranks of dp, sp and tp anew. Found .* by itself"):
            mesh.ranks(*axes)


def test_a_mesh_needs_a_world() -> None:
    with pytest.raises(MeshError, match=r"Call colossal\.launch_from_torch\(\) first"):
        ParallelMesh()
    with pytest.raises(MeshError):
        current_mesh()


def test_ranks_of_a_replica_may_be_numbered_one_after_the_other() -> None:
    numbers = list(itertools.product(range(2), range(3), range(2), range(2)))  # dp, pp, sp, tp
    for rank, (dp, pp, sp, tp) in enumerate(numbers):
        with fake_world(24, rank=rank):
            mesh = ParallelMesh(pp=3, dp=2, sp=2, tp=2, dp_outside=True)
            assert mesh.coordinate == {"pp": pp, "dp": dp, "sp": sp, "tp": tp}
            assert mesh.ranks("dp") == (rank % 12, rank % 12 + 12)
            assert mesh.ranks("pp") == tuple(rank - 4 * pp + 4 * stage for stage in range(3))


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_an_axis_is_cut_into_blocks_of_neighbours(length) -> None:
    for rank in range(12):
        with fake_world(12, rank=rank):
            mesh = ParallelMesh(dp=6, tp=2)
            own, across = map(dist.get_process_group_ranks, mesh.blocks("dp", length))
            place, tp = divmod(rank, 2)
            first = place - place % length
            assert own == [2 * each + tp for each in range(first, first + length)]
            assert across == [2 * each + tp for each in range(place % length, 6, length)]


def test_blocks_divide_their_axis() -> None:
    with fake_world(6), pytest.raises(MeshError, match="Found 4 for the 6 ranks of 'dp'"):
        ParallelMesh(dp=6).blocks("dp", 4)


def test_ranks_that_share_a_sequence_are_folded_behind_their_data_parallel_rank() -> None:
    for rank in range(24):
        with fake_world(24, rank=rank):
            mesh = ParallelMesh(pp=2, dp=3, sp=2, tp=2)
            folded = mesh.fold_sp_into_dp()
            assert folded.shape == {"pp": 2, "dp": 6, "sp": 1, "tp": 2}
            assert folded.rank("dp") == 2 * mesh.rank("dp") + mesh.rank("sp")
            assert folded.ranks("dp") == mesh.ranks("dp", "sp")
            assert [folded.ranks(axis) for axis in ("pp", "tp")] == [mesh.ranks(axis) for axis in ("pp", "tp")]
            assert mesh.shape == {"pp": 2, "dp": 3, "sp": 2, "tp": 2}
            assert folded.fold_sp_into_dp() is folded


@pytest.mark.parametrize("verb", ["size", "rank", "ranks", "group"])
def test_an_unknown_axis_is_refused(verb) -> None:
    with fake_world(2), pytest.raises(MeshError, match="Found 'data'"):
        getattr(ParallelMesh(), verb)("data")


def test_the_innermost_mesh_is_ambient() -> None:
    with fake_world(4):
        outside = current_mesh()
        with ParallelMesh(tp=2) as outer:
            assert current_mesh() is outer
            with ParallelMesh(tp=4) as inner, inner:
                assert current_mesh() is inner
            assert current_mesh() is outer
        assert current_mesh() is outside


def test_a_mesh_inherits_local_rank_and_timeout() -> None:
    with fake_world(4, rank=3), ParallelMesh(local_rank=1, timeout_seconds=7.0):
        mesh = ParallelMesh(tp=2)
        assert (mesh.local_rank, mesh.timeout_seconds) == (1, 7.0)


def test_the_local_rank_comes_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with fake_world(8, rank=6):
        assert ParallelMesh().local_rank == 2


def sum_over_axes() -> dict[str, float]:
    mesh = ParallelMesh(pp=2, tp=2)
    sums = {}
    for axis in AXES:
        total = torch.tensor(float(mesh.global_rank))
        dist.all_reduce(total, group=mesh.group(axis))
        sums[axis] = total.item()
    return sums


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_groups_connect_the_ranks_of_their_axis(run) -> None:
    assert run(sum_over_axes, 4) == [
        {"pp": 0 + 2, "dp": 0, "sp": 0, "tp": 0 + 1},
        {"pp": 1 + 3, "dp": 1, "sp": 1, "tp": 0 + 1},
        {"pp": 0 + 2, "dp": 2, "sp": 2, "tp": 2 + 3},
        {"pp": 1 + 3, "dp": 3, "sp": 3, "tp": 2 + 3},
    ]
