"""Links between devices, grids that suit them, meshes by names, and a block that one rank runs first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal.errors import ColossalError
from colossal.legacy.cluster import DeviceMeshInfo, DeviceMeshManager, priority_execution
from colossal.legacy.device import AlphaBetaProfiler
from colossal.testing import fake_world, run_processes, run_threads

FAST, SLOW = (1e-6, 1e-10), (1e-5, 1e-9)


def links(size: int, is_fast: Callable[[int, int], bool]) -> dict[tuple[int, int], tuple[float, float]]:
    return {(a, b): FAST if is_fast(a, b) else SLOW for a in range(size) for b in range(size) if a != b}


@pytest.mark.parametrize(
    ("size", "is_fast", "grid"),
    [
        (4, lambda a, b: a % 2 == b % 2, [[0, 2], [1, 3]]),
        (8, lambda a, b: a // 4 == b // 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, lambda _a, _b: True, [[0, 1], [2, 3]]),
        (3, lambda _a, _b: True, [[0, 1, 2]]),
        (3, lambda a, b: a + b == 1, [[0, 1, 2]]),
    ],
)
def test_a_grid_has_fast_links_along_its_last_axis(size: int, is_fast: Any, grid: list[list[int]]) -> None:
    profiler = AlphaBetaProfiler(range(size), links(size, is_fast))
    assert profiler.search_best_logical_mesh() == grid
    alphas, betas = profiler.extract_alpha_beta_for_device_mesh()
    along_rows = [profiler.alpha_beta_dict[row[0], each] for row in grid for each in row[1:]]
    assert (alphas[1], betas[1]) == max(along_rows)
    assert (alphas[0], betas[0]) == (max(FAST, profiler.alpha_beta_dict[0, grid[1][1]]) if len(grid) > 1 else (0, 0))


def measure(ctype: Any) -> Any:
    found = AlphaBetaProfiler(range(3), ctype=ctype, warmup=1, repeat=2, latency_iters=2).alpha_beta_dict
    assert found[0, 2] == found[2, 0]
    return found


@pytest.mark.parametrize("ctype", ["a", "b"])
def test_links_are_measured_alike_on_all_ranks(ctype: str) -> None:
    first, second, third = run_processes(measure, 3, ctype)
    assert first == second == third
    assert sorted(first) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(0 < number < 1 for link in first.values() for number in link)


def test_a_mesh_without_a_shape_is_the_one_that_suits_the_links() -> None:
    def program() -> Any:
        manager = DeviceMeshManager()
        mesh = manager.create_device_mesh("all", DeviceMeshInfo([1, 0]))
        assert manager.get("all") is mesh
        assert mesh.all_reduce_cost(1 << 20, 1) > mesh.all_reduce_cost(1, 1) > 0
        return mesh.logical_mesh_id.tolist()

    assert run_threads(program, 2) == [[[1, 0]]] * 2


def test_meshes_have_names() -> None:
    manager = DeviceMeshManager()
    mesh = manager.create_device_mesh("one", DeviceMeshInfo(list(range(4)), (2, 2)))
    assert torch.equal(mesh.logical_mesh_id, torch.tensor([[0, 1], [2, 3]]))
    manager.destroy("one")
    manager.create_device_mesh("one", DeviceMeshInfo([0, 1], [2]))
    manager.destroy_all()
    assert manager.device_mesh_store == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AlphaBetaProfiler([0]), r"Found \[0\]"),
        (lambda: AlphaBetaProfiler([0, 1], {}), r"none for \[\(0, 1\)\]"),
        (lambda: AlphaBetaProfiler([0, 1], ctype="c"), "ctype='c'"),  # pyright: ignore[reportArgumentType]
        (lambda: AlphaBetaProfiler([1, 2]), "Found rank 0"),
        (lambda: DeviceMeshInfo([0, 1, 2], (2, 2)), r"Found \[0, 1, 2\]"),
        (lambda: DeviceMeshManager().get("none"), "Found 'none'"),
        (lambda: [*map(DeviceMeshManager().create_device_mesh, "aa", [DeviceMeshInfo([0], [1])] * 2)], "Found 'a'"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], message: str) -> None:
    with fake_world(4), pytest.raises(ColossalError, match=message):
        make()


def test_one_rank_goes_first() -> None:
    order: list[int] = []

    def program() -> None:
        with priority_execution(executor_rank=2):
            order.append(dist.get_rank())

    run_threads(program, 3)
    assert order[0] == 2
    assert sorted(order) == [0, 1, 2]
