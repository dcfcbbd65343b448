# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""Sequences that pipelines cut: modules by their names, parameters that several stages have, and what layers weigh."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from families import build, inputs_of
from torch import nn

from colossal._src.pipeline import Stage
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import ConfigError, PlanError
from colossal.pipeline import ExecutionSequence, count_layer_parameters, measure_layer_times, partition_balanced
from colossal.shardformer import plan_of
from colossal.testing import run_processes

WIDTH, STEPS = 6, 3


class Net(nn.Module):
    """As users write one: two residual blocks of which one runs twice, and a function before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.relu = nn.ReLU()
        self.blocks = nn.ModuleDict({"once": nn.Conv2d(WIDTH, WIDTH, 1), "twice": nn.Conv2d(WIDTH, WIDTH, 1)})
        self.fc = nn.Linear(WIDTH * 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks["twice"](self.relu(self.conv(x)))
        x = self.blocks["once"](torch.tanh(x))
        return self.fc(torch.tanh(self.blocks["twice"](x)).flatten(1))


EXEC_SEQ: list[Any] = ["conv", "relu", "blocks.twice", torch.tanh, "blocks.once", "blocks.twice"]
EXEC_SEQ += [(torch.tanh, "behind"), (lambda x: x.flatten(1), "front"), "fc"]


class Table(nn.Module):
    """A head that has the weight of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "named":
        return Net().double()
    if kind == "sequential with names":  # of square layers: every stage could run all of them
        names = {"first": nn.Linear(4, 4), "between": nn.Tanh(), "last": nn.Linear(4, 4)}
        return nn.Sequential(OrderedDict(names)).double()
    if kind == "module":  # one module on three stages
        shared = nn.Linear(4, 4)
        layers = [nn.Linear(4, 4), shared, nn.Tanh(), nn.Linear(4, 4), shared, nn.Tanh(), shared, nn.Linear(4, 1)]
    else:  # two modules with one parameter
        table = nn.Embedding(7, 4)
        layers = [table, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), Table(table.weight)]
    return nn.Sequential(*layers).double()


def batch_of(kind: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    if kind == "tied":
        return torch.randint(0, 7, (4, 3), generator=draw)
    return torch.randn((4, 1, 4, 4) if kind == "named" else (4, 4), generator=draw).double()


def criterion(outputs: torch.Tensor, _inputs: Any = None) -> torch.Tensor:
    return outputs.square().mean()


CASES = [
    ("named", 2, "1f1b", None),
    ("named", 2, "zbv", None),
    ("sequential with names", 2, "1f1b", None),
    ("module", 2, "interleaved", None),
    ("module", 3, "1f1b", (3, 2, 3)),
    ("tied", 2, "1f1b", None),
    ("tied", 2, "zbv", None),
]


def train(kind: str, size: int, style: Any, counts: Any) -> list[Any]:
    """Train on a pipeline: the losses, and the parameters of this rank by their names."""
    model: nn.Module = model_of(kind)
    if kind == "named":
        model = ExecutionSequence(model, EXEC_SEQ)
    assert isinstance(model, (nn.Sequential, ExecutionSequence))
    layers = counts or partition_balanced(count_layer_parameters(model), size * (1 if style == "1f1b" else 2))
    plugin = HybridParallelPlugin(
        1,
        size,
        precision="fp32",
        max_norm=0.1,
        pp_style=style,
        num_model_chunks=1 if style == "1f1b" else 2,
        num_microbatches=2,
        num_layers_per_stage=layers,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(booster.execute_pipeline(iter([batch_of(kind)]), model, criterion, optimizer)["loss"])
        norms.append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
    modules = [stage.module for stage in model.unwrap().stages]
    parameters = {name: p.data for each in modules for name, p in each.named_parameters(remove_duplicate=False)}
    return [losses, norms, parameters]


@pytest.mark.parametrize("case", CASES)
def test_sequences_equal_one_process(case) -> None:
    kind, size, *_ = case
    alone, losses, norms = model_of(kind), [], []
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(STEPS):
        losses.append(loss := criterion(alone(batch_of(kind))))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    expected, seen = dict(alone.named_parameters(remove_duplicate=False)), {}
    for found, measured, parameters in run_processes(train, size, *case):
        torch.testing.assert_close(torch.stack(found), torch.stack(losses).detach(), rtol=1e-9, atol=0)
        assert [float(each) for each in measured] == pytest.approx(norms, rel=1e-9)
        for name, value in parameters.items():
            if name in seen:
                assert torch.equal(seen[name], value)  # to the last bit, so that they never come apart
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-8, atol=1e-10)
        seen |= parameters
    assert seen.keys() == expected.keys()


def test_steps_that_do_not_fit() -> None:
    net = Net()
    for steps, message in (
        (["conv", "relu", "nothing"], "Found 'nothing', but Net has blocks, blocks.once"),
        (["conv", net.relu], "a function must not be a module"),
        (["conv", (torch.tanh, "between")], "goes with 'front' or 'behind'"),
        ([(torch.tanh, "behind"), "conv"], "no module before it"),
        (["conv", (torch.tanh, "front")], "no module follows"),
        ([], "no module follows"),
    ):
        with pytest.raises(ConfigError, match=message):
            ExecutionSequence(net, steps)
    with pytest.raises(PlanError, match=r"Found no step for blocks\.once\.weight"):
        ExecutionSequence(net, ["conv", "blocks.twice", "fc"])


def test_functions_stay_with_their_module() -> None:
    whole = ExecutionSequence(model_of("named"), EXEC_SEQ)
    x = batch_of("named")
    expected = model_of("named")(x)
    assert torch.equal(whole(x), expected)
    layers = [range(5), range(5, 6)]
    first, last = (
        Stage.of_sequential(ExecutionSequence(model_of("named"), EXEC_SEQ), layers, index) for index in (0, 1)
    )
    passed = first(None, x)
    assert passed.shape == (4, WIDTH, 4, 4)  # flattened on the second stage, with the head
    assert torch.equal(last(passed, None), expected)
    assert [name for name, _ in last.module.named_parameters()] == ["fc.weight", "fc.bias"]


# ------------------------------------------------------------------------------------------ what layers weigh


class Slow(nn.Module):
    """Works as often as it is told, forward and backward."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times, self.calls = nn.Linear(64, 64), times, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.times):
            x = self.linear(x)
        return x


def measure() -> list[float]:
    return measure_layer_times(nn.Sequential(*map(Slow, (40, 1, 1, 1))), torch.ones(64, 64), num_runs=3)


def test_all_ranks_know_what_the_first_has_measured() -> None:
    first, second = run_processes(measure, 2)
    assert first == second
    assert all(each > 0 for each in first)


def test_layers_are_measured_and_gradients_stay() -> None:
    model = nn.Sequential(slow := Slow(2), nn.Flatten(), nn.Linear(64, 1))
    model(torch.ones(2, 64)).sum().backward()
    before, slow.calls = [p.grad.clone() for p in model.parameters() if p.grad is not None], 0
    assert len(measure_layer_times(model, torch.ones(2, 64), num_runs=2)) == 3
    assert slow.calls == 1 + 1 + 2  # to see what it gets, to warm up, and to measure
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    with pytest.raises(ConfigError, match="Found num_runs=0"):
        measure_layer_times(model, torch.ones(2, 64), num_runs=0)
    with pytest.raises(PlanError, match="Found Linear without a plan"):
        count_layer_parameters(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_layers_of_a_plan_have_weights(name) -> None:
    model = build(name, num_layers=3)
    stages = plan_of(model).stages
    counts = count_layer_parameters(model, stages)
    assert (
        len(counts)
        == len(measure_layer_times(model, inputs_of(name), stages, num_runs=1))
        == (5 if name == "t5" else 3)
    )
    assert all(count > 0 for count in counts)
