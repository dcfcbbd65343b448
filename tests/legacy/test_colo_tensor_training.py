"""Models of distributed parameters train as one process does: loss, every gradient, parameters after three steps."""

from typing import Any

import pytest
import torch
from colo_models import loss_of, make_model, tensor_parallelize, tokens_of
from equality import assert_equal
from torch import distributed as dist
from torch import nn

from colossal.legacy.tensor import (
    ColoInitContext,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ShardSpec,
)
from colossal.legacy.zero import LowLevelZeroOptimizer
from colossal.tensor import full_tensor_of
from colossal.testing import run_threads

SIZE = 4


def train_one_process(*, clip: bool = False) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, grads = [], {}
    for step in range(3):
        optimizer.zero_grad()
        tokens = tokens_of(step, SIZE)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        losses.append(loss.detach())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        grads = grads or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
    return losses, grads, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_ranks(
    tp: int, *, clip: bool = False, checkpoint: bool = False, rows: bool = False, shard_init: bool = False
) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    group = ProcessGroup(tp_degree=tp)
    spec = ShardSpec([-1], [tp]) if shard_init else None
    with ColoInitContext(device="cpu", dtype=torch.float64, default_pg=group, default_dist_spec=spec):
        model: Any = make_model(recompute=checkpoint)
    tensor_parallelize(model, group, vocabulary_rows=rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    per_replica = SIZE // group.dp_world_size()
    losses, grads = [], {}
    for step in range(3):
        optimizer.zero_grad()
        tokens = tokens_of(step, SIZE)[group.dp_local_rank() * per_replica :][:per_replica]
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        mean = torch.tensor(loss.item(), dtype=torch.float64)
        dist.all_reduce(mean, group=group.dp_process_group())
        losses.append(mean / group.dp_world_size())
        parameter: Any
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group.dp_process_group())
            parameter.grad.div_(group.dp_world_size())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        grads = grads or {name: full_tensor_of(parameter.grad).clone() for name, parameter in model.named_parameters()}
        optimizer.step()
    return losses, grads, {name: full_tensor_of(parameter).clone() for name, parameter in model.named_parameters()}


def assert_same(found: Any, expected: Any) -> None:
    losses, grads, values = found
    wanted_losses, wanted_grads, wanted_values = expected
    for step, (loss, wanted) in enumerate(zip(losses, wanted_losses, strict=True)):
        assert_equal(loss, wanted, f"loss of step {step}")
    for name, wanted in wanted_grads.items():
        assert_equal(grads[name], wanted, f"gradient of {name}")
    for name, wanted in wanted_values.items():
        assert_equal(values[name], wanted, name)


@pytest.mark.parametrize(
    ("tp", "ranks", "options"),
    [
        (1, 2, {}),
        (2, 2, {}),
        (2, 4, {"clip": True}),
        (4, 4, {"rows": True}),
        (2, 4, {"checkpoint": True, "shard_init": True}),
        (3, 3, {"clip": True}),
    ],
)
def test_trains_as_one_process(tp: int, ranks: int, options: dict[str, bool]) -> None:
    expected = train_one_process(clip=options.get("clip", False))
    for found in run_threads(train_ranks, ranks, tp, **options):
        assert_same(found, expected)


def train_by_zero(*, clip: bool, partition_grad: bool) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    """As `train_ranks`, with states that are sharded over the replicas of the parameters' group."""
    group = ProcessGroup(tp_degree=2)
    with ColoInitContext(device="cpu", dtype=torch.float64, default_pg=group):
        model: Any = make_model()
    tensor_parallelize(model, group, vocabulary_rows=False)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = LowLevelZeroOptimizer(inner, clip_grad_norm=0.1 if clip else 0.0, partition_grad=partition_grad)
    per_replica = SIZE // group.dp_world_size()
    losses: list[torch.Tensor] = []
    for step in range(3):
        tokens = tokens_of(step, SIZE)[group.dp_local_rank() * per_replica :][:per_replica]
        loss = loss_of(model(tokens), tokens)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(loss.item(), dtype=torch.float64)
        dist.all_reduce(mean, group=group.dp_process_group())
        losses.append(mean / group.dp_world_size())
    return losses, {}, {name: full_tensor_of(parameter).clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("clip", "partition_grad"), [(False, False), (True, True)])
def test_low_level_zero_shards_states_over_the_replicas_of_the_group(clip: bool, partition_grad: bool) -> None:
    losses, _, values = train_one_process(clip=clip)
    for found in run_threads(train_by_zero, 4, clip=clip, partition_grad=partition_grad):
        assert_same(found, (losses, {}, values))


@pytest.mark.parametrize("dim", [0, -1])
def test_a_tensor_that_is_made_of_a_parameter_gets_its_gradient(dim: int) -> None:
    values, x, factor = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed, shape in enumerate([(4, 6), (2, 6), (2, 4)])
    )

    def program() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        group, whole = ProcessGroup(tp_degree=2), nn.Parameter(values.clone())
        weight = ColoTensor(whole, ColoTensorSpec(group))
        weight.set_tensor_spec(ShardSpec([dim], [2]), ComputeSpec(ComputePattern.TP1D))
        assert weight.is_leaf
        outputs: Any = nn.functional.linear(x, weight)
        outputs.to_replicate().backward(factor)
        assert weight.grad is not None
        return weight.grad.detach().as_subclass(torch.Tensor), whole.grad

    whole = nn.Parameter(values.clone())
    nn.functional.linear(x, whole).backward(factor)
    assert whole.grad is not None
    for (grad, of_parameter), expected in zip(run_threads(program, 2), whole.grad.chunk(2, dim), strict=True):
        assert of_parameter is None
        torch.testing.assert_close(grad, expected)
