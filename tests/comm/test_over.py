"""Totals over groups, and values of the first rank for all."""

import pytest
import torch

from colossal._src.comm.channel import _PACK_BYTES
from colossal.cluster import ParallelMesh
from colossal.comm import Channel, CommCounter, all_reduce_over
from colossal.testing import fake_world, run_processes, run_threads


def totals() -> list[list[float]]:
    mesh = ParallelMesh(dp=2, tp=2)
    groups = [mesh.group("dp"), mesh.group("tp")]
    own = torch.tensor([float(mesh.global_rank), -1.0])
    found = [all_reduce_over(own, groups, "sum"), all_reduce_over(own, groups, "max"), all_reduce_over(own, groups[:1])]
    return [each.tolist() for each in (*found, own)]


def test_a_total_over_the_groups_of_two_axes_is_one_over_all_ranks() -> None:
    for rank, (total, largest, over_dp, own) in enumerate(run_processes(totals, 4)):
        assert total == [6.0, -4.0]
        assert largest == [3.0, -1.0]
        assert over_dp == [2.0 * (rank % 2) + 2.0, -2.0]
        assert own == [float(rank), -1.0]


def test_what_there_is_nothing_to_combine_with_is_returned_as_it_is() -> None:
    value = torch.ones(3)
    assert all_reduce_over(value, []) is value
    with fake_world(2), ParallelMesh(tp=2) as mesh:
        assert all_reduce_over(value, [mesh.group("dp")]) is value


def test_totals_are_counted_along_their_axes() -> None:
    with fake_world(4), ParallelMesh(dp=2, tp=2) as mesh, CommCounter() as counter:
        all_reduce_over(torch.zeros(8), [mesh.group("dp"), mesh.group("tp")])
    assert counter.bytes == {("all_reduce", "dp"): 32, ("all_reduce", "tp"): 32}


def share() -> list[list[torch.Tensor]]:
    with ParallelMesh(dp=2, tp=2) as mesh:
        rank = mesh.global_rank
        own = [
            torch.full((2, 3), float(rank)),
            torch.tensor(rank),
            torch.empty(0),
            torch.tensor([rank % 2 == 0, True]),
            torch.full((4, 2), float(rank)).t(),
            torch.nn.Parameter(torch.full((2,), float(rank), dtype=torch.bfloat16)),
        ]
        Channel("tp").broadcast(own)
        return [each.detach().clone() for each in own]


@pytest.mark.parametrize("run", [run_processes, run_threads])
def test_all_ranks_of_an_axis_get_the_values_of_its_first(run) -> None:
    for rank, found in enumerate(run(share, 4)):
        first = rank // 2 * 2
        assert [tensor.unique().tolist() for tensor in found[:3]] == [[first], [first], []]
        assert found[3].tolist() == [True, True]
        assert (found[4] == first).all()
        assert found[4].shape == (2, 4)
        assert (found[5] == first).all()


def test_small_tensors_travel_together_and_large_ones_alone() -> None:
    with fake_world(2), ParallelMesh(dp=2), CommCounter() as counter:
        Channel("dp").broadcast([torch.zeros(4)] * 100)
        assert counter.calls == {("broadcast", "dp"): 1}
        assert counter.bytes == {("broadcast", "dp"): 800}
        Channel("dp").broadcast([torch.zeros(_PACK_BYTES, dtype=torch.int8)] * 3 + [torch.zeros(1)])
        assert counter.calls == {("broadcast", "dp"): 5}
