"""Grids of ranks by the names of the older API."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal.cluster import AxisCost, Link, LinkCost
from colossal.errors import MeshError
from colossal.legacy.cluster import ProcessGroupManager, ProcessGroupMesh
from colossal.legacy.device import DeviceMesh
from colossal.testing import fake_world, run_threads


def test_groups_of_a_process_group_mesh() -> None:
    def program() -> Any:
        mesh = ProcessGroupMesh(1, 2, 2)
        groups = [mesh.get_group_along_axis(axis) for axis in (1, 2)]
        total = torch.tensor(float(mesh.rank))
        dist.all_reduce(total, group=groups[1])
        both = mesh.get_group_along_axis([1, 2])
        found = [mesh.get_ranks_in_group(group) for group in (*groups, both)]
        assert mesh.get_group_along_axis(1) is groups[0]
        return mesh.coordinate(), found, total.item()

    results = run_threads(program, 4)
    assert [coordinate for coordinate, *_ in results] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert results[2][1] == [[0, 2], [2, 3], [0, 1, 2, 3]]
    assert [total for *_, total in results] == [1.0, 1.0, 5.0, 5.0]


def test_places_of_ranks() -> None:
    with fake_world(8, rank=5):
        mesh = ProcessGroupMesh(2, 2, 2)
        assert (mesh.shape, mesh.size(), mesh.size(1), mesh.coordinate(2)) == ((2, 2, 2), (2, 2, 2), 2, 1)
    assert ProcessGroupMesh.unravel(5, (2, 2, 2)) == (1, 0, 1)
    assert ProcessGroupMesh.ravel((1, 0, 1), (2, 2, 2)) == 5
    assert ProcessGroupMesh.ravel((-1, 0, 3), (2, 2, 2), mode="wrap") == 5
    assert ProcessGroupMesh.ravel((-1, 0, 3), (2, 2, 2), mode="clip") == 1
    assert ProcessGroupMesh.get_coords_along_axis((1, 0, 1), 1, [0, 1]) == [(1, 0, 1), (1, 1, 1)]
    assert ProcessGroupMesh.get_coords_along_axis((0, 0), [0, 1], [[1], [0, 1]]) == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProcessGroupMesh(3), r"\(3,\) for 4 processes"),
        (lambda: ProcessGroupMesh.ravel((2, 0), (2, 2)), r"\(2, 0\) in \(2, 2\)"),
        (lambda: ProcessGroupMesh.unravel(4, (2, 2)), "Found 4"),
        (lambda: ProcessGroupManager().create_process_group("a", [1, 2]), r"\[1, 2\] on rank 0"),
        (lambda: ProcessGroupManager().get("a"), "Found 'a'"),
        (lambda: DeviceMesh(torch.arange(4), (3, 2)), "Found 4 ranks"),
        (lambda: DeviceMesh(torch.tensor([0, 0])), "each rank once"),
        (lambda: DeviceMesh(torch.arange(4), (2, 2), torch.arange(4)), "Pass one of both"),
        (lambda: DeviceMesh(torch.arange(4), (2, 2), mesh_alpha=[1.0]), "for each of 2 axes"),
        (lambda: DeviceMesh(torch.arange(4), (2, 2)).get_process_group(1, global_rank=2), "that of rank 2"),
        (lambda: DeviceMesh(torch.arange(4), (2, 2)).get_process_group(2), "axis 2"),
        (lambda: DeviceMesh(torch.arange(4)).global_rank_to_local_rank(7), "Found rank 7"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], message: str) -> None:
    with fake_world(4), pytest.raises(MeshError, match=message):
        make()


def test_groups_by_names() -> None:
    with fake_world(4, rank=1):
        manager = ProcessGroupManager()
        group = manager.create_process_group("pair", [0, 1])
        assert manager.get("pair") is group
        assert dist.get_process_group_ranks(group) == [0, 1]
        manager.destroy_all()
        assert manager.pg_store == {}


def test_device_mesh_without_processes() -> None:
    assert DeviceMesh(torch.arange(4), (2, 2), need_flatten=True).flatten().shape == (4,)
    mesh = DeviceMesh(torch.arange(16), (4, 4), mesh_alpha=[2e-5, 1e-5], mesh_beta=[2e-9, 1e-9])
    assert (mesh.shape, mesh.num_devices, mesh.is_initialized) == ((4, 4), 16, False)
    assert mesh.global_rank_to_local_rank(5) == [1, 1]
    assert mesh.global_rank_to_local_rank(11, axis=1) == 3
    assert mesh.get_ranks_in_process_group(axis=0, global_rank=2) == [2, 6, 10, 14]
    assert mesh.flatten().shape == (16,)
    known = LinkCost({"tp": AxisCost(4, Link(1e-5, 1e-9)), "dp": AxisCost(4, Link(2e-5, 2e-9))})
    for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
        for axis, name in enumerate(("dp", "tp")):
            found = getattr(mesh, f"{op}_cost")(4096, axis)
            assert found == known.seconds(op, name, 4096)


def test_device_mesh_of_process_groups() -> None:
    def program() -> Any:
        first = DeviceMesh(torch.tensor([[0, 2], [1, 3]]), init_process_group=True)
        groups = [first.get_process_group(axis) for axis in (0, 1)]
        second = DeviceMesh.from_process_group(groups)
        assert second.get_process_group(0) is groups[0]
        assert list(second.get_process_group_for_all_axes()) == [0, 1]
        return second.logical_mesh_id.tolist(), second.get_ranks_in_process_group(1)

    results = run_threads(program, 4)
    assert [mesh for mesh, _ in results] == [[[0, 2], [1, 3]]] * 4
    assert [ranks for _, ranks in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
