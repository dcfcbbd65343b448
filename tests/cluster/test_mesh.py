import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from colossal.cluster import AXES, ParallelMesh, current_mesh
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
    ],
)
def test_sizes_that_do_not_fit_are_refused(world, sizes, message) -> None:
    with fake_world(world), pytest.raises(MeshError, match=message):
        ParallelMesh(**sizes)


def test_a_mesh_needs_a_world() -> None:
    with pytest.raises(MeshError, match=r"Call colossal\.launch_from_torch\(\) first"):
        ParallelMesh()
    with pytest.raises(MeshError):
        current_mesh()


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
