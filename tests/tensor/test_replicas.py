import pytest
import torch
from torch import nn

from colossal._src.cluster import Axis
from colossal._src.tensor import Layout, Placement, Replicas, replicas_of, set_placement
from colossal.cluster import ParallelMesh
from colossal.errors import PlanError
from colossal.testing import fake_world


def shard_over(axis: Axis, mesh: ParallelMesh) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(8 // mesh.size(axis), 2))
    layout = Layout.parse("S0R", (8, 2), mesh=mesh, axes=[axis])
    set_placement(parameter, Placement(layout, mesh.global_rank, shard_groups=(mesh.group(axis),)))
    return parameter


def test_shards_over_tp_and_ep_are_replicated_over_the_other_ranks() -> None:
    with fake_world(8):
        mesh = ParallelMesh(tp=2, ep=4)
        assert replicas_of(shard_over("tp", mesh), mesh) == Replicas(mesh)
        assert replicas_of(shard_over("ep", mesh), mesh) == Replicas(mesh, "edp")


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "ep": 2}, {"ep": 2}], ids=str)
def test_shards_over_the_ranks_of_dp_are_refused(sizes: dict[str, int]) -> None:
    with fake_world(8):
        mesh = ParallelMesh(**sizes)  # pyright: ignore[reportArgumentType]
        parameter = shard_over("dp", mesh)
        message = r"of the shape \(?\[?8, 2\]?\)?, sharded over the ranks .* Enter the mesh of the model first"
        with pytest.raises(PlanError, match=message):
            replicas_of(parameter, mesh)
