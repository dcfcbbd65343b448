"""Conversions between shardings on a mesh of devices by the older names, with gradients."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal.errors import ConfigError, PlanError
from colossal.legacy.d_tensor import DimSpec, distribute_tensor
from colossal.legacy.d_tensor import ShardingSpec as DimShardingSpec
from colossal.legacy.device import DeviceMesh
from colossal.legacy.shape_consistency import (
    CollectiveCommPattern,
    CommSpec,
    MeshShardingSpec,
    ShapeConsistencyManager,
)
from colossal.testing import fake_world, run_threads

P = CollectiveCommPattern
FREE = {"forward": 0.0, "backward": 0.0, "total": 0.0}
FULL = torch.arange(64.0).reshape(8, 8)


def square(**costs: Any) -> DeviceMesh:
    return DeviceMesh(torch.arange(4), (2, 2), **costs)


def held(mesh: DeviceMesh, dims: dict[int, list[int]]) -> torch.Tensor:
    return distribute_tensor(FULL, mesh, DimShardingSpec(2, dims)).detach().clone()


CASES: dict[str, tuple[dict[int, list[int]], dict[int, list[int]], dict[str, Any]]] = {
    "gather": ({0: [0, 1]}, {0: [0]}, {"gather_dim": 0, "logical_process_axis": 1}),
    "split": ({0: [0]}, {0: [0, 1]}, {"shard_dim": 0, "logical_process_axis": 1}),
    "all2all": ({0: [0]}, {1: [0]}, {"gather_dim": 0, "shard_dim": 1, "logical_process_axis": 0}),
    "mixgather": ({0: [0, 1]}, {}, {"gather_dim": [0, 0], "logical_process_axis": [0, 1]}),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("by_groups", [False, True])
def test_a_collective_converts_values_and_gradients(kind: str, by_groups: bool) -> None:
    before, after, options = CASES[kind]
    pattern = next(each for each in P if each.value.startswith(kind))

    def program() -> None:
        mesh = square()
        source: Any = mesh.process_groups_dict if by_groups else MeshShardingSpec(mesh, (8, 8), before)
        tensor: Any = held(mesh, before).requires_grad_()
        made = CommSpec(pattern, source, **options).covert_spec_to_action(tensor)
        assert torch.equal(made, held(mesh, after))
        made.backward(held(mesh, after) ** 2)
        assert torch.equal(tensor.grad, held(mesh, before) ** 2)

    run_threads(program, 4)


def test_sums_and_their_gradients() -> None:
    def program() -> Any:
        spec = MeshShardingSpec(square(), (2,))
        own = torch.full((2,), float(dist.get_rank())).requires_grad_()
        total = CommSpec(P.ALLREDUCE_FWD_IDENTITY_BWD, spec, logical_process_axis=0).covert_spec_to_action(own)
        total.backward(torch.full((2,), 3.0))
        same = torch.ones(2, requires_grad=True)
        used = CommSpec(P.IDENTITY_FWD_ALLREDUCE_BWD, spec, logical_process_axis=1).covert_spec_to_action(same)
        (used * dist.get_rank()).sum().backward()
        return total.tolist(), own.grad.tolist(), same.grad.tolist()

    results = run_threads(program, 4)
    assert [found[0][0] for found in results] == [2.0, 4.0, 2.0, 4.0]
    assert [found[1] for found in results] == [[3.0, 3.0]] * 4
    assert [found[2][0] for found in results] == [1.0, 1.0, 5.0, 5.0]


def test_a_path_is_run_by_its_actions_as_by_apply() -> None:
    def program() -> None:
        mesh, manager = square(mesh_alpha=[1e-5, 1e-6], mesh_beta=[1e-9, 1e-10]), ShapeConsistencyManager()
        source, target = MeshShardingSpec(mesh, (8, 8), {0: [0, 1]}), MeshShardingSpec(mesh, (8, 8), {1: [0, 1]})
        path, actions, cost = manager.shape_consistency(source, target)
        assert [str(spec.sharding_sequence) for spec in path] == ["[S01, R]", "[S0, R]", "[R, S0]", "[R, S01]"]
        assert [action.comm_pattern for action in actions] == [
            P.GATHER_FWD_SPLIT_BWD,
            P.ALL2ALL_FWD_ALL2ALL_BWD,
            P.SPLIT_FWD_GATHER_BWD,
        ]
        assert manager.cached_spec_pairs_transform_path["[S01, R]", "[R, S01]"] == (path, actions)
        assert cost["total"] == pytest.approx(sum(action.get_comm_cost()["total"] for action in actions))
        assert cost["forward"] == pytest.approx(mesh.all_gather_cost(4 * 32, 1) + mesh.all_to_all_cost(4 * 64, 0))
        tensor: Any = held(mesh, {0: [0, 1]}).requires_grad_()
        by_actions = tensor
        for action in actions:
            by_actions = action.covert_spec_to_action(by_actions)
        with pytest.raises(PlanError, match="Found None"):
            manager.apply(tensor, target)
        tensor.sharding_spec = source
        made: Any = manager.apply(tensor, target)
        assert made.sharding_spec is target
        assert torch.equal(made, by_actions)
        assert torch.equal(made, held(mesh, {1: [0, 1]}))
        made.backward(made.detach())
        assert torch.equal(tensor.grad, held(mesh, {0: [0, 1]}))

    run_threads(program, 4)


def test_the_bytes_that_a_conversion_takes() -> None:
    """Of an 8 x 8 tensor on 2 x 2 ranks: 16 elements on the way from and to S01, else 32."""
    manager, mesh = ShapeConsistencyManager(), square()
    source, target = MeshShardingSpec(mesh, (8, 8), {0: [0, 1]}), MeshShardingSpec(mesh, (8, 8), {1: [0, 1]})
    _, actions, _ = manager.shape_consistency(source, target)
    assert manager.mem_cost(actions) == {"forward": 4 * (32 + 32), "backward": 4 * (32 + 32), "total": 4 * (32 + 32)}
    # a gather makes the full rows, and its gradient the shard; the tensor that is converted is not counted
    assert manager.mem_cost(actions[:1]) == {"forward": 4 * 32, "backward": 4 * 16, "total": 4 * 32}
    assert manager.mem_cost([]) == {"forward": 0, "backward": 0, "total": 0}
    with fake_world(4), pytest.raises(PlanError, match="Found process groups"):
        manager.mem_cost([CommSpec(P.SPLIT_FWD_GATHER_BWD, {}, None, 0, 0)])


def test_what_is_one_step_away() -> None:
    manager, source = ShapeConsistencyManager(), MeshShardingSpec(square(), (8, 8, 3), {0: [0], 1: [1]})

    def listed(found: Any) -> list[str]:
        return sorted(str(spec.sharding_sequence) for spec in found)

    assert listed(manager.get_all_all_gather_spec(source, FREE)) == ["[R, S1, R]", "[S0, R, R]"]
    # The last dimension does not divide by 2.
    assert listed(manager.get_all_all_to_all_spec(source, FREE)) == ["[R, S10, R]", "[S01, R, R]"]
    assert listed(manager.get_all_shard_spec(source, FREE)) == []
    assert listed(manager.get_all_shard_spec(MeshShardingSpec(square(), (8, 8), {0: [0]}), FREE)) == [
        "[S0, S1]",
        "[S01, R]",
    ]
    assert listed(manager.get_all_mix_gather_spec(source, FREE)) == ["[R, R, R]"]
    every = manager.get_all_one_step_transform_spec(source, {"forward": 1.0, "backward": 2.0, "total": 3.0})
    assert len(every) == 4
    for action, cost in every.values():
        assert cost["total"] == pytest.approx(3.0 + action.get_comm_cost()["total"])


def test_a_sharding_on_a_mesh() -> None:
    spec = MeshShardingSpec(square(), (8, 6), sharding_sequence=[DimSpec([]), DimSpec([1])])
    assert (spec.dim_partition_dict, spec.get_sharded_shape_per_device()) == ({1: [1]}, torch.Size([8, 3]))
    assert repr(spec) == "DistSpec(shard_sequence: R,S1, device_mesh_shape: (2, 2))"
    assert spec.sharding_sequence_difference(spec) == 0
    assert spec.sharding_sequence_difference(MeshShardingSpec(square(), (8, 6), {1: [0]})) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda spec: CommSpec(P.GATHER_FWD_SPLIT_BWD, spec, logical_process_axis=0), "gather_dim=None"),
        (lambda spec: CommSpec(P.ALLREDUCE_FWD_IDENTITY_BWD, spec), "logical_process_axis=None"),
        (lambda _: CommSpec(P.SPLIT_FWD_GATHER_BWD, {}, None, 0, 0).get_comm_cost(), "Found process groups"),
        (lambda spec: MeshShardingSpec(spec.device_mesh, (3,), {0: [0]}), "divides by its number of shards"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[Any], object], message: str) -> None:
    with fake_world(4), pytest.raises(PlanError, match=message):
        make(MeshShardingSpec(square(), (8, 8)))


def test_a_sharded_tensor_becomes_a_full_one() -> None:
    to_global = importlib.import_module("colossal.tensor.shape_consistency").to_global

    def program() -> None:
        mesh = square()
        own: Any = held(mesh, {0: [0], 1: [1]}).requires_grad_()
        full = to_global(own, MeshShardingSpec(mesh, (8, 8), {0: [0], 1: [1]}))
        assert torch.equal(full, FULL)
        assert full.sharding_spec.dim_partition_dict == {}
        full.backward(FULL**2)
        assert torch.equal(own.grad, held(mesh, {0: [0], 1: [1]}) ** 2)

    run_threads(program, 4)


def test_conversions_have_no_options_to_set() -> None:
    module = importlib.import_module("colossal.tensor.d_tensor.layout_converter")
    module.set_layout_converting_options(module.LayoutConverterOptions())
    module.set_layout_converting_options(None)
    with pytest.raises(ConfigError, match="no options to set"):
        module.set_layout_converting_options({"greedy": True})
