# pyright: reportUnknownMemberType=false
"""A layer of experts trains on ranks as in one process that runs the batch of each rank by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from equality import assert_equal
from plugins import plugins
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.nn.moe import (
    Capacity,
    FeedForwardExperts,
    MixtureOfExperts,
    Router,
    RouterLosses,
    update_expert_biases,
)
from colossal.tensor import ParallelPlan, Stages
from colossal.testing import assert_equal_to_one_process, run_processes

WIDTH, NUM_EXPERTS, STEPS = 6, 4, 3


@dataclass(frozen=True)
class Case:
    """What is special about a model or its batches."""

    capacity: Capacity | None = None
    num_unused: int = 0
    numbers: Sequence[int] = (5, 5, 5, 5)
    """How many samples the ranks have."""
    recomputes: bool = False
    bias_rate: float = 0.0


CASES = {
    "dropless": Case(),
    "overflow": Case(Capacity(train=0.5, minimum=2)),
    "unused experts": Case(num_unused=2),
    "uneven, and none": Case(numbers=(7, 0, 4, 9)),
    "recomputation, overflow, biases": Case(Capacity(train=0.75, minimum=2), recomputes=True, bias_rate=0.05),
}


class Block(nn.Module):
    """Experts of one kind or the other, with a residual connection."""

    def __init__(self, case: Case, number: int, mesh: ParallelMesh | None) -> None:
        super().__init__()
        losses = RouterLosses(aux_weight=0.3, z_weight=0.1)
        options: dict[str, Any] = {"capacity": case.capacity, "losses": losses, "bias_rate": case.bias_rate}
        router = Router(WIDTH, NUM_EXPERTS, 2, renormalize=bool(number), mesh=mesh, **options)
        if number:
            experts: Any = FeedForwardExperts(NUM_EXPERTS, WIDTH, 8, bias=True)
        else:
            experts = [nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(NUM_EXPERTS)]
        self.moe = MixtureOfExperts(router, experts, nn.Linear(WIDTH, WIDTH) if number else None, mesh=mesh)

    def forward(self, hidden: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, routing = self.moe(hidden)
        return hidden + output, losses + routing.loss


class Net(nn.Module):
    def __init__(self, case: Case, mesh: ParallelMesh | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(case, number, mesh) for number in range(2)])
        self.last = nn.Linear(WIDTH, 1)
        self.recomputes = case.recomputes

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, losses = self.first(inputs), inputs.new_zeros(())
        for block in self.blocks:
            if self.recomputes:
                hidden, losses = checkpoint(block, hidden, losses, use_reentrant=False)
            else:
                hidden, losses = block(hidden, losses)
        return self.last(hidden), losses


def build(case: Case, mesh: ParallelMesh | None = None) -> Net:
    torch.manual_seed(4)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        net = Net(case, mesh)
    finally:
        torch.set_default_dtype(default)
    if case.num_unused:
        with torch.no_grad():
            for block in net.blocks:
                router: Any = block.get_submodule("moe.router")
                router.weight[: case.num_unused] = 0
                router.weight[case.num_unused :] += 0.5
            net.first.bias.add_(3)  # so that all inner products with the others are positive
    return net


def batch_of(case: Case, step: int, part: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(17 * step)
    inputs = torch.randn(sum(case.numbers), WIDTH, generator=draw, dtype=torch.float64)
    return inputs.split([*case.numbers])[part]


def loss_of(outputs: tuple[torch.Tensor, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    found, losses = outputs
    return (found - inputs.sin().sum(1, keepdim=True)).square().sum() / 5 + losses


First = dict[str, tuple[torch.Tensor, torch.Tensor]]
Trained = tuple[list[torch.Tensor], list[torch.Tensor], First, dict[str, torch.Tensor]]


def train_one(case: Case, parts: int) -> Trained:
    """Norms, losses of all parts, parameters and gradients of the first step, and parameters after the last."""
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    first: First = {}
    for step in range(STEPS):
        of_parts = [loss_of(model(inputs), inputs) for inputs in (batch_of(case, step, part) for part in range(parts))]
        torch.stack(of_parts).mean().backward()
        if not step:
            for name, each in model.named_parameters():
                assert each.grad is not None, name
                first[name] = each.detach().clone(), each.grad.clone()
        losses.append(torch.stack(of_parts).detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        update_expert_biases(model)
    state = {name: each.detach() for name, each in model.named_parameters()}
    biases = dict(model.named_buffers())
    assert len(first) == len(state)
    check_case(case, model)
    return norms, losses, first, state | biases


def check_case(case: Case, model: Net) -> None:
    """Whether batches are what the case says of them."""
    block: Any = model.blocks[0]
    routing = block.moe(model.first(batch_of(case, 0, 0)))[1]
    assert (int(routing.num_dropped) > 0) == (case.capacity is not None)
    if case.num_unused:
        assert not routing.tokens_per_expert[: case.num_unused].any()
    assert not case.bias_rate or block.moe.router.bias_steps.any()


def check(model: Any, expected: dict[str, torch.Tensor], **options: Any) -> None:
    parameters = {name: each for name, each in expected.items() if not name.endswith("bias_steps")}
    assert_equal_to_one_process(model, parameters, rtol=1e-8, atol=1e-10, **options)


def with_gradients(first: First) -> dict[str, torch.Tensor]:
    """The initial parameters of one process, and the gradients of its first step."""
    found: dict[str, torch.Tensor] = {}
    for name, (value, grad) in first.items():
        found[name] = nn.Parameter(value)
        found[name].grad = grad
    return found


def train(case: Case, booster: Booster, model: Any, part: int, expected: Trained, *, label: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    norms, losses, first, state = expected
    for step in range(STEPS):
        inputs = batch_of(case, step, part)
        loss = loss_of(model(inputs), inputs)
        assert_equal(loss.detach(), losses[step][part], f"{label}: loss of step {step}")
        booster.backward(loss, optimizer)
        if not step and label == "DDP":
            check(model, with_gradients(first), gradients=True)
        norm = torch.as_tensor(optimizer.clip_grad_by_norm(1.0), dtype=torch.float64)
        assert_equal(norm, norms[step], f"{label}: norm of step {step}")
        optimizer.step()
        optimizer.zero_grad()
        update_expert_biases(model)
    check(model, state)
    for name, value in model.unwrap().named_buffers():
        assert torch.equal(value, state[name]), name


WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"dp": 2, "ep": 2}),
    "ep4": (4, {"dp": 4, "ep": 4}),
    "dp2-ep2": (4, {"dp": 4, "ep": 2}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "dp2-tp2-ep4": (4, {"dp": 2, "tp": 2, "ep": 4}),
}
PLUGINS = plugins("DDP", "ZeRO-1", "ZeRO-2", "Gemini")


def train_on_ranks(world: str, cases: dict[str, Case], expected: dict[str, Trained]) -> None:
    with ParallelMesh(**WORLDS[world][1]) as mesh:
        for name, case in cases.items():
            for label, make in PLUGINS.items():
                booster = Booster(device="cpu", plugin=make())
                train(case, booster, build(case, mesh), mesh.rank("dp"), expected[name], label=label)


FAST = "ep2", "tp2-ep2"


@pytest.mark.parametrize(
    "world", [world if world in FAST else pytest.param(world, marks=pytest.mark.slow) for world in WORLDS]
)
def test_equals_one_process(world: str) -> None:
    size, axes = WORLDS[world]
    expected = {name: train_one(case, axes.get("dp", 1)) for name, case in CASES.items()}
    run_processes(train_on_ranks, size, world, CASES, expected)


# ------------------------------------------------------------------------------------------ pipelines

PLAN = ParallelPlan(
    {"blocks.*.moe.experts": "ep_experts"},
    stages=Stages("blocks", pre_layers=("first",), layer_outputs=("hidden", "losses")),
)
OF_PIPELINE = Case(Capacity(train=0.5, minimum=2))


def train_pipeline(zero_stage: int, expected: Trained) -> None:
    plugin = HybridParallelPlugin(
        1, 2, ep_size=2, precision="fp32", zero_stage=zero_stage, num_microbatches=2, custom_policy=PLAN
    )
    booster = Booster(device="cpu", plugin=plugin)
    model: Any = build(OF_PIPELINE)
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
    for step in range(STEPS):
        parts = [batch_of(OF_PIPELINE, step, 2 * plugin.mesh.rank("dp") + number) for number in range(2)]
        result = booster.execute_pipeline(iter([torch.cat(parts)]), model, criterion, optimizer)
        own = expected[1][step].view(2, 2)[plugin.mesh.rank("dp")].mean()
        if result["loss"] is not None:
            assert_equal(result["loss"].detach(), own, f"loss of step {step}")
        norm = torch.as_tensor(optimizer.clip_grad_by_norm(1.0), dtype=torch.float64)
        assert_equal(norm, expected[0][step], f"norm of step {step}")
        optimizer.step()
        optimizer.zero_grad()
    check(model, expected[3])


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_losses_travel_through_a_pipeline(zero_stage: int) -> None:
    run_processes(train_pipeline, 4, zero_stage, train_one(OF_PIPELINE, 4))
