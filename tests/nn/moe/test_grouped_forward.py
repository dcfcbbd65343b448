# pyright: reportArgumentType=false
"""Rows that are sorted by expert are computed without sorting them again, equal to the experts' forward method."""

import copy
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import EXPERTS, build
from torch import nn

from colossal._src.nn.moe.grouped_forward import multiplies_groups
from colossal._src.nn.moe.grouped_products import multiply_groups
from colossal._src.nn.moe.row_order import RowOrder
from colossal.cluster import ParallelMesh
from colossal.nn.moe import shard_experts
from colossal.testing import run_processes

WIDTH = 64
NUM_TOKENS = {"uneven": (9, 4), "a rank without tokens": (6, 0)}


def experts_of(name: str, implementation: str) -> Any:
    model: Any = build(name, num_layers=2)
    model.set_experts_implementation(implementation)
    return model.model.layers[-1].mlp.experts


def routing(numbers: tuple[int, ...], num_experts: int) -> list[Any]:
    """Tokens, two different experts for each but never the last one, and weights; for each rank."""
    draw, found = torch.Generator().manual_seed(1), list[Any]()
    for number in numbers:
        tokens = torch.randn(number, WIDTH, generator=draw, dtype=torch.float64)
        chosen = torch.rand(number, num_experts - 1, generator=draw).argsort(1)[:, :2]
        found.append((tokens, chosen, torch.rand(number, 2, generator=draw, dtype=torch.float64)))
    return found


def run(experts: nn.Module, parts: list[Any]) -> dict[str, torch.Tensor]:
    """Results and gradients of one call on joined tokens."""
    tokens, chosen, weights = (torch.cat(each) for each in zip(*parts, strict=True))
    tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
    result = experts(tokens, chosen, weights)
    result.square().sum().backward()
    grads = {"tokens": tokens.grad, "weights": weights.grad}
    grads |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"result": result.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def run_sharded(name: str, numbers: tuple[int, ...], frozen: str) -> dict[str, torch.Tensor]:
    with ParallelMesh(ep=2) as mesh:
        experts = experts_of(name, "grouped_mm")
        if frozen:
            experts.get_parameter(frozen).requires_grad_(False)
        parts = routing(numbers, experts.num_experts)
        experts = shard_experts(experts, mesh)
        assert multiplies_groups(experts)
        return run(experts, [parts[mesh.rank("ep")]])


@pytest.mark.parametrize("numbers", NUM_TOKENS.values(), ids=NUM_TOKENS)
@pytest.mark.parametrize("name", EXPERTS)
def test_equals_the_forward_method(name: str, numbers: tuple[int, ...]) -> None:
    experts = experts_of(name, "eager")
    expected = run(experts, routing(numbers, experts.num_experts))
    found = run_processes(run_sharded, 2, name, numbers, "")
    assert all(rank.keys() == expected.keys() for rank in found)  # zeros where nothing arrives, not None
    for key, value in expected.items():
        assert_equal(torch.cat([rank[key] for rank in found]), value, key)


def test_what_is_frozen_gets_no_gradient() -> None:
    for found in run_processes(run_sharded, 2, "mixtral", NUM_TOKENS["uneven"], "gate_up_proj"):
        assert found.keys() == {"result", "tokens", "weights", "down_proj"}


def test_twice_differentiable() -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, generator=draw, dtype=torch.float64, requires_grad=True)

    def multiply(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return multiply_groups(x, matrices, (2, 0, 3))

    assert torch.autograd.gradcheck(multiply, (rows, weight))
    assert torch.autograd.gradgradcheck(multiply, (rows, weight))


def test_sums_twice_differentiable() -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, generator=draw, dtype=torch.float64, requires_grad=True)
    order = RowOrder.by(torch.tensor([2, 0, 1, 0, 0, 2]), 2)[1]
    expected = (order.restore(order.take(rows[:3])) / 2).detach()
    assert_equal(expected, rows[:3].detach(), "copies of tokens, added up")
    assert torch.autograd.gradcheck(order.add_weighted, (rows, weights))
    assert torch.autograd.gradgradcheck(order.add_weighted, (rows, weights))


def test_sums_are_in_the_longer_dtype() -> None:
    order = RowOrder.by(torch.zeros(2, dtype=torch.int64), 2)[1]
    rows = torch.tensor([[1.0], [2.0**-8]], dtype=torch.bfloat16)
    found = order.add_weighted(rows, torch.tensor([[1.0, 2.0]]))
    assert found.dtype == torch.bfloat16
    assert float(found) == 1 + 2.0**-7  # in bfloat16, each half would have been rounded away


class Doubling(nn.Module):
    """Experts of a program: those with a method for rows that are sorted never run their forward method."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.scales = nn.Parameter(torch.arange(1, 5, dtype=torch.float64))
        self.ends: list[int] = []

    def forward_grouped(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        self.ends = ends.tolist()
        return rows * self.scales.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))[:, None]


def run_own_method() -> tuple[list[int], torch.Tensor]:
    with ParallelMesh(ep=2) as mesh:
        experts: Any = shard_experts(Doubling(), mesh)
        found = experts(torch.ones(2, 3, dtype=torch.float64), torch.tensor([[3, 0], [1, 3]]), torch.ones(2, 2))
        return experts.ends, found


def test_own_method_for_sorted_rows() -> None:
    for (ends, found), expected in zip(run_processes(run_own_method, 2), ([2, 4], [0, 4]), strict=True):
        assert ends == expected
        assert_equal(found, torch.tensor([[5.0], [6.0]], dtype=torch.float64).expand(2, 3), "results")


def test_what_computes_otherwise_runs_its_own_forward_method() -> None:
    grouped, eager = (experts_of("mixtral", each) for each in ("grouped_mm", "eager"))
    with_norm = copy.copy(grouped)
    with_norm.has_post_expert_norm = True
    assert multiplies_groups(grouped)
    assert not any(multiplies_groups(each) for each in (eager, with_norm, nn.Linear(2, 2)))
