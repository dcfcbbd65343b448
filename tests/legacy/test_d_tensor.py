"""Plain tensors with a layout on a `DeviceMesh`: shards, conversions with gradients, paths."""

from typing import Any

import pytest
import torch

from colossal.errors import PlanError, UnsupportedError
from colossal.legacy.d_tensor import (
    DimSpec,
    DTensorLayout,
    LayoutConverter,
    ShardingSpec,
    compute_global_numel,
    distribute_tensor,
    get_device_mesh,
    get_global_shape,
    get_layout,
    get_sharding_spec,
    init_as_dtensor,
    is_distributed_tensor,
    redistribute,
    sharded_tensor_to_param,
    to_global,
)
from colossal.legacy.device import DeviceMesh
from colossal.testing import run_threads


def test_tensors_are_sharded_converted_and_gathered() -> None:
    full = torch.arange(32.0).view(8, 4)

    def program() -> Any:
        mesh = DeviceMesh(torch.tensor([[0, 2], [1, 3]]), init_process_group=True)
        tensor = distribute_tensor(full, mesh, ShardingSpec(2, {0: [0]}))
        first = tensor.clone()
        assert (get_global_shape(tensor), compute_global_numel(tensor)) == ((8, 4), 32)
        assert get_device_mesh(tensor) is mesh
        assert redistribute(tensor, mesh, ShardingSpec(2, {1: [1, 0]})) is tensor
        assert get_sharding_spec(tensor).sharding_sequence == [DimSpec([]), DimSpec([1, 0])]
        parameter = sharded_tensor_to_param(tensor)
        (to_global(parameter) * full).sum().backward()
        with pytest.raises(UnsupportedError, match="LayoutConverter"):
            redistribute(
                init_as_dtensor(parameter * 1, mesh, get_sharding_spec(parameter), (8, 4)), mesh, ShardingSpec(2)
            )
        return first, tensor, to_global(tensor), parameter.grad

    for rank, (first, moved, gathered, grad) in enumerate(run_threads(program, 4)):
        column = {0: 0, 2: 2, 1: 1, 3: 3}[rank]
        assert torch.equal(first, full.chunk(2)[rank % 2])
        assert torch.equal(moved, full[:, column : column + 1])
        assert torch.equal(gathered, full)
        assert torch.equal(grad, full[:, column : column + 1])


def test_the_documented_path() -> None:
    mesh = DeviceMesh(torch.arange(4), (2, 2))
    source, target = (DTensorLayout(mesh, ShardingSpec(3, spec), (64, 32, 16)) for spec in ({0: [0, 1]}, {1: [0, 1]}))
    converter = LayoutConverter()
    path, actions = converter.layout_converting(source, target)
    shown = "->".join(str(layout.sharding_spec.sharding_sequence) for layout in path)
    assert shown == "[S01, R, R]->[S0, R, R]->[R, S0, R]->[R, S01, R]"
    taken = [(each.comm_pattern.name, each.gather_dim, each.shard_dim, each.logical_process_axis) for each in actions]
    assert taken == [
        ("GATHER_FWD_SPLIT_BWD", 0, None, 1),
        ("ALL2ALL_FWD_ALL2ALL_BWD", 0, 1, 0),
        ("SPLIT_FWD_GATHER_BWD", None, 1, 1),
    ]
    assert converter.cached_solution == {("[S01, R, R]", "[R, S01, R]"): (path, actions)}
    cost = converter.get_total_comm_cost(source, target)
    assert cost["forward"] > 0
    assert cost["total"] == cost["forward"] + cost["backward"]
    assert source.sharding_spec.spec_diff(source.sharding_spec) == 0
    assert source.sharding_spec.spec_diff(target.sharding_spec) > 0


def test_layouts_that_are_one_collective_away() -> None:
    def found(layouts: dict[DTensorLayout, Any]) -> dict[str, str]:
        return {str(each.sharding_spec.sharding_sequence): by.comm_pattern.name for each, by in layouts.items()}

    mesh, converter = DeviceMesh(torch.arange(4), (2, 2)), LayoutConverter()
    both, first = (DTensorLayout(mesh, ShardingSpec(3, spec), (64, 32, 16)) for spec in ({0: [0], 1: [1]}, {0: [0]}))
    gathered = found(converter.all_gather_transform_layouts(both))
    assert gathered == dict.fromkeys(["[R, S1, R]", "[S0, R, R]"], "GATHER_FWD_SPLIT_BWD")
    moved = found(converter.all_to_all_transform_layout(both))
    assert {"[S01, R, R]", "[R, S1, S0]", "[S0, R, S1]"} <= moved.keys()
    assert set(moved.values()) == {"ALL2ALL_FWD_ALL2ALL_BWD"}
    split = found(converter.shard_transform_layout(first))
    assert split == dict.fromkeys(["[S01, R, R]", "[S0, S1, R]", "[S0, R, S1]"], "SPLIT_FWD_GATHER_BWD")
    every = found(converter.get_all_one_step_transform_spec(both))
    assert every == gathered | moved | found(converter.shard_transform_layout(both))


def test_what_does_not_fit_is_refused() -> None:
    mesh = DeviceMesh(torch.arange(4), (2, 2))
    with pytest.raises(PlanError, match="each axis once"):
        ShardingSpec(2, {0: [0], 1: [0]})
    with pytest.raises(PlanError, match="2 dimensions"):
        ShardingSpec(2, {2: [0]})
    with pytest.raises(PlanError, match="Found both"):
        ShardingSpec(1, {0: [0]}, [DimSpec([0])])
    with pytest.raises(PlanError, match="divides by its number of shards, 4"):
        DTensorLayout(mesh, ShardingSpec(1, {0: [0, 1]}), (6,))
    with pytest.raises(PlanError, match="holds"):
        init_as_dtensor(torch.ones(3), mesh, ShardingSpec(1, {0: [0]}), (4,))
    with pytest.raises(PlanError, match="distribute_tensor"):
        get_layout(torch.ones(2))
    assert not is_distributed_tensor(torch.ones(2))
    assert ShardingSpec(2, sharding_sequence=[DimSpec([1]), DimSpec([])]).dim_partition_dict == {0: [1]}
