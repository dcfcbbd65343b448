from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from colossal.cluster import DistCoordinator, ParallelMesh, current_mesh, launch_from_torch
from colossal.errors import LaunchError, MeshError
from colossal.testing import WorldError, fake_world, run_processes, run_threads


def test_a_coordinator_needs_a_world() -> None:
    with pytest.raises(MeshError):
        DistCoordinator()


@pytest.mark.parametrize(("rank", "master", "last"), [(0, True, False), (3, False, True)])
def test_places_in_the_world(rank, master, last) -> None:
    with fake_world(4, rank=rank):
        coordinator = DistCoordinator(ParallelMesh(local_rank=rank % 2))
        assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (rank, 4, rank % 2)
        assert (coordinator.is_master(), coordinator.is_last_process()) == (master, last)
        assert coordinator.is_node_master() == (rank % 2 == 0)


def test_places_in_a_group() -> None:
    with fake_world(4, rank=2):
        mesh = ParallelMesh(tp=2)
        coordinator = DistCoordinator(mesh)
        assert coordinator.is_master(mesh.group("tp"))
        assert coordinator.is_last_process(mesh.group("dp"))
        assert not coordinator.is_master()


def test_only_the_master_prints(capsys) -> None:
    for rank in (0, 1):
        with fake_world(2, rank=rank):
            coordinator = DistCoordinator(ParallelMesh(local_rank=rank))
            coordinator.print_on_master(f"master {rank}")
            coordinator.print_on_node_master(f"node {rank}")
    assert capsys.readouterr().out == "master 0\nnode 0\n"


def test_the_master_prints_what_print_does(capsys) -> None:
    with fake_world(4, rank=2):
        mesh = ParallelMesh(tp=2)
        coordinator, group = DistCoordinator(mesh), mesh.group("tp")
        coordinator.print_on_master("left out", 1)
        coordinator.print_on_master("loss", torch.tensor(0.5), group)
        coordinator.print_on_master("loss", 1, 2.0, process_group=group, sep=", ", end=".\n")
        coordinator.print_on_master(process_group=group)
    with fake_world(2):
        DistCoordinator().print_on_node_master("step", 3, sep="=")
    assert capsys.readouterr().out == "loss tensor(0.5000)\nloss, 1, 2.0.\n\nstep=3\n"


def test_only_the_master_runs_a_decorated_function() -> None:
    returned = []
    for rank in (0, 1):
        with fake_world(2, rank=rank):

            @DistCoordinator().on_master_only()
            def double(number: int) -> int:
                """Double."""
                return 2 * number

            returned.append(double(21))
            assert double.__doc__ == "Double."
    assert returned == [42, None]


def append_in_turn(path: str, first: int) -> None:
    coordinator = DistCoordinator()
    with coordinator.priority_execution(first), Path(path).open("a") as file:
        file.write(str(coordinator.rank))
        file.flush()
    coordinator.block_all()


def test_one_process_goes_first(tmp_path) -> None:
    for first in (0, 2):
        run_processes(append_in_turn, 3, str(tmp_path / f"order{first}"), first)
        text = (tmp_path / f"order{first}").read_text()
        assert text[0] == str(first)
        assert sorted(text) == ["0", "1", "2"]


def write_to_a_full_disk() -> None:
    if dist.get_rank() == 0:
        raise OSError("disk full")


def fail_first() -> str:
    try:
        with DistCoordinator().priority_execution():
            write_to_a_full_disk()
            return "ran"
    except (OSError, LaunchError) as error:
        return str(error)


def test_a_failure_of_the_first_process_is_an_error_on_all_at_once() -> None:
    own, other = run_processes(fail_first, 2)
    assert own == "disk full"
    assert "Rank 0 runs the block of priority_execution before the others" in other


def go_first_as_9() -> None:
    with DistCoordinator().priority_execution(9):
        pass


def test_the_process_that_goes_first_must_exist() -> None:
    with pytest.raises(WorldError, match="Found executor_rank=9 in a group of 2"):
        run_threads(go_first_as_9, 2)


def destroy_everything() -> bool:
    mesh = ParallelMesh(tp=2)
    coordinator = DistCoordinator(mesh)
    coordinator.destroy(mesh.group("pp"))
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == 2
    coordinator.destroy()
    return dist.is_initialized()


def test_groups_can_be_dissolved() -> None:
    assert run_processes(destroy_everything, 2) == [False, False]


def test_the_mesh_of_a_dissolved_world_is_not_ambient() -> None:
    """A program that launches again must not work on the mesh of the world before."""
    launch_from_torch(verbose=False)
    DistCoordinator().destroy()
    with pytest.raises(MeshError, match="no process group"):
        current_mesh()
    launch_from_torch(verbose=False)
    assert current_mesh().world_size == 1
    DistCoordinator().destroy()
