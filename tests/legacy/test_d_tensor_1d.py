"""Tensors sharded over one group, and tensors that a program shards by functions of its own."""

from typing import Any

import pytest
import torch
from torch import nn

from colossal.errors import PlanError
from colossal.legacy.cluster import ProcessGroupMesh
from colossal.legacy.d_tensor import (
    ShardingSpec,
    customized_distributed_tensor_to_param,
    distribute_tensor,
    distribute_tensor_with_customization,
    get_global_shape,
    get_shard_dim_1d,
    init_as_dtensor,
    init_tensor_as_customization_distributed,
    is_customized_distributed_tensor,
    is_sharded,
    shard_colwise,
    shard_rowwise,
    sharded_tensor_to_existing_param,
    to_global,
    to_global_for_customized_distributed_tensor,
)
from colossal.legacy.device import DeviceMesh
from colossal.testing import fake_world, run_threads

FULL = torch.arange(24.0).view(4, 6)


def test_rows_and_columns_are_sharded_over_a_group_or_a_mesh() -> None:
    def program() -> Any:
        group = ProcessGroupMesh(2, 2).get_group_along_axis(1)
        rows, columns = shard_rowwise(FULL, group), shard_colwise(FULL, group)
        assert (get_shard_dim_1d(rows), get_shard_dim_1d(columns)) == (0, 1)
        assert is_sharded(rows)
        assert torch.equal(to_global(rows), FULL)
        assert torch.equal(to_global(columns), FULL)
        everywhere = shard_rowwise(FULL, DeviceMesh(torch.arange(4), (4,), init_process_group=True))
        assert torch.equal(everywhere, shard_rowwise(FULL))
        return rows.tolist(), columns.tolist(), everywhere.tolist()

    for rank, (rows, columns, quarter) in enumerate(run_threads(program, 4)):
        place = rank % 2
        assert rows == FULL[2 * place : 2 * place + 2].tolist()
        assert columns == FULL[:, 3 * place : 3 * place + 3].tolist()
        assert quarter == FULL[rank : rank + 1].tolist()


def test_a_parameter_takes_a_shard() -> None:
    with fake_world(2, rank=1):
        weight = nn.Parameter(FULL.clone())
        sharded_tensor_to_existing_param(shard_colwise(FULL), weight)
    assert torch.equal(weight, FULL[:, 3:])
    assert weight.requires_grad
    assert get_global_shape(weight) == (4, 6)


def test_what_is_not_sharded_along_one_dimension_is_refused() -> None:
    with fake_world(4):
        mesh = DeviceMesh(torch.arange(4), (2, 2))
        both = distribute_tensor(FULL, mesh, ShardingSpec(2, {0: [0], 1: [1]}))
        with pytest.raises(PlanError, match=r"\[S0, S1\]"):
            get_shard_dim_1d(both)
        with pytest.raises(PlanError, match="divides by its number of shards, 4"):
            shard_colwise(FULL)
        part = init_as_dtensor(torch.ones(2, 6), mesh, ShardingSpec(2, {0: [0]}), (4, 6))
        part.resize_(1, 6)
        assert not is_sharded(part)


def test_a_program_shards_by_functions_of_its_own() -> None:
    part = distribute_tensor_with_customization(FULL, lambda full: full[::2], lambda half: half.repeat(2, 1))
    assert torch.equal(part, FULL[::2])
    assert is_customized_distributed_tensor(part)
    weight = customized_distributed_tensor_to_param(part, requires_grad=False)
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert torch.equal(to_global_for_customized_distributed_tensor(weight), torch.cat([FULL[::2]] * 2))
    with pytest.raises(PlanError, match="Found a tensor that has some"):
        init_tensor_as_customization_distributed(part, torch.abs, torch.abs)
    with pytest.raises(PlanError, match="Found one that does not"):
        to_global_for_customized_distributed_tensor(torch.ones(1))
