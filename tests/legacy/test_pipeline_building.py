# pyright: reportArgumentType=false
"""Models that are built or partitioned for a rank by the older names train as in one process."""

import importlib
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import ConfigError
from colossal.legacy.pipeline import (
    LayerSpec,
    ModelFromConfig,
    PipelinableContext,
    PipelineSharedModuleWrapper,
    build_pipeline_model,
    build_pipeline_model_from_cfg,
    partition_balanced,
    partition_uniform,
    stage_modules_of,
)
from colossal.legacy.registry import MODELS
from colossal.pipeline import partition_uniform as partition_over_stages
from colossal.testing import run_processes

WIDTH, BATCH, STEPS = 6, 8, 3
EXEC_SEQ: list[Any] = ["embed", torch.tanh, "first", "second", (lambda x: x * 2, "behind"), "third", "head"]


class Net(nn.Module):
    """A head with the weight of the first layer, and modules that run in another order than they are built in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.second, self.first, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.third(self.second(self.first(torch.tanh(self.embed(x)))) * 2))


@MODELS.register_module
class FromConfig(ModelFromConfig):
    def __init__(self, depth: int) -> None:
        super().__init__()
        linear = {"type": "Linear", "in_features": WIDTH, "out_features": WIDTH, "dtype": torch.float64}
        self.layers_cfg += [LayerSpec(nn.Tanh), *([linear] * depth)]

    def init_weights(self) -> None:
        for name, layer in self.layers.items():
            for parameter in layer.parameters():
                fill(parameter, int(name))


class Half(nn.Module):
    """A stage as a user builds it on its rank."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False).double() if first else None
        self.head = None if first else nn.Linear(WIDTH, WIDTH, bias=False).double()
        for parameter in self.parameters():
            fill(parameter, 3 + first)

    def forward(self, x: Any) -> torch.Tensor:
        layer = self.embed or self.head
        assert layer is not None
        return torch.tanh(layer(x))


def fill(parameter: torch.Tensor, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64) * 0.4)


def sequential() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(50 + step)
    x, y = torch.randn(2, BATCH, WIDTH, generator=draws, dtype=torch.float64)
    return x, y


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[1]).square().mean()


def part_of(kind: str, rank: int) -> nn.Module:
    if kind in ("balanced", "uniform", "customized", "bounds"):
        policy: Any = {0: [(0, 2)], 1: [(2, 5)]} if kind == "bounds" else kind
        pipelinable = PipelinableContext(policy)
        torch.manual_seed(3)
        with pipelinable:
            Net()
        steps = [*EXEC_SEQ[:3], "SPLIT_NODE", *EXEC_SEQ[3:]] if kind == "customized" else EXEC_SEQ
        pipelinable.to_layer_list(steps)
        assert (pipelinable.layers_count, pipelinable.funcs_count) == (5, 2)
        return pipelinable.partition(1, 2, rank)
    if kind == "config":
        return build_pipeline_model_from_cfg({"type": "FromConfig", "depth": 3}, partition_method="parameter")
    if kind == "wrapper":
        wrapper, stage = PipelineSharedModuleWrapper([0, 1]), Half(first=rank == 0)
        wrapper.register_module(stage.embed if stage.embed is not None else stage.head)
        return stage
    return build_pipeline_model(sequential(), num_chunks=2, verbose=True)


def train(kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {"pp_style": "interleaved", "num_model_chunks": 2} if kind == "chunks" else {}
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, precision="fp32", num_microbatches=2, **options)
    with plugin.mesh:
        model = part_of(kind, plugin.mesh.rank("pp"))
        optimizer, booster = torch.optim.AdamW(model.parameters(), lr=0.1), Booster("cpu", plugin=plugin)
        boosted, optimizer, *_ = booster.boost(stage_modules_of(model), optimizer)
        losses, grads, stages = [], {}, boosted.unwrap().stages
        for step in range(STEPS):
            losses.append(booster.execute_pipeline(iter([batch_of(step)]), boosted, loss_of, optimizer)["loss"])
            if step == 0:
                grads = {name: each.grad.clone() for name, each in named(stages)}
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "grads": grads, "parameters": {name: each.detach() for name, each in named(stages)}}


def named(stages: Any) -> list[tuple[str, Any]]:
    return [pair for stage in stages for pair in stage.module.named_parameters(remove_duplicate=False)]


def full_model(kind: str) -> nn.Module:
    if kind == "chunks":
        return sequential()
    if kind == "config":
        model = FromConfig(3)
        model.build_from_cfg()
        return model
    if kind == "wrapper":
        first, last = Half(first=True), Half(first=False)
        last.head.weight = first.embed.weight
        return nn.Sequential(first, last)
    torch.manual_seed(3)
    return Net()


@pytest.mark.parametrize("kind", ["balanced", "uniform", "customized", "bounds", "chunks", "config", "wrapper"])
def test_a_model_for_the_ranks_of_a_pipeline_equals_one_process(kind: str) -> None:
    ranks, model = run_processes(train, 2, kind), full_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = loss_of(model(batch_of(step)[0]), batch_of(step))
        loss.backward()
        for rank in ranks:
            assert_equal(rank["losses"][step], loss.detach(), f"loss of step {step}")
        if step == 0:
            expected = {name: each.grad.clone() for name, each in model.named_parameters(remove_duplicate=False)}
            for rank in ranks:
                for name, grad in rank["grads"].items():
                    assert_equal(grad, expected[name], f"gradient of {name}")
        optimizer.step()
        optimizer.zero_grad()
    full = dict(model.named_parameters(remove_duplicate=False))
    assert {name for rank in ranks for name in rank["parameters"]} == full.keys()
    assert all(len(rank["parameters"]) < len(full) for rank in ranks)
    for rank in ranks:
        for name, value in rank["parameters"].items():
            assert_equal(value, full[name].detach(), f"{name} after {STEPS} steps")


def test_layers_that_are_left_over_go_to_later_ranks() -> None:
    assert partition_uniform(10, 4, 1) == [[(0, 2)], [(2, 4)], [(4, 7)], [(7, 10)]]
    assert partition_uniform(10, 2, 2) == [[(0, 2), (5, 7)], [(2, 5), (7, 10)]]
    assert partition_over_stages(10, 4) != [range(*bounds[0]) for bounds in partition_uniform(10, 4, 1)]
    with pytest.raises(ConfigError, match="10 layers and num_chunks=3"):
        partition_uniform(10, 2, 3)
    with pytest.raises(ConfigError, match="Each stage of a pipeline has a layer"):
        partition_uniform(3, 4, 1)


def test_stages_of_equal_weight_go_round_the_ranks() -> None:
    parts = partition_balanced([3, 1, 1, 1, 3, 3], 2, 2)
    assert parts == [[(0, 1), (4, 5)], [(1, 4), (5, 6)]]


def test_a_layer_is_built_from_its_description() -> None:
    spec = LayerSpec(nn.Sequential, LayerSpec(nn.Linear, 4, 2, bias=False), LayerSpec(nn.ReLU))
    spec.count_params()
    assert (spec.param_count, repr(spec.build()[0])) == (8, "Linear(in_features=4, out_features=2, bias=False)")
    assert spec.build()[0].weight.device.type == "cpu"
    spec.set_children([LayerSpec(nn.Linear, 2, 2)])
    assert len(spec.build()) == 1
    spec.reset_param_count()
    assert spec.param_count == 0


def test_what_does_not_fit_is_rejected() -> None:
    with pytest.raises(ConfigError, match="A policy is balanced, uniform, customized"):
        PipelinableContext("even")
    with PipelinableContext("customized") as pipelinable:
        Net()
    with pytest.raises(ConfigError, match="to_layer_list"):
        pipelinable.partition(1, 2, 0)
    with pytest.raises(ConfigError, match=r"Found 0 among \['Net'\]"):
        pipelinable.to_layer_list(["embed", "other"])
    pipelinable.to_layer_list(EXEC_SEQ)
    with pytest.raises(ConfigError, match="Each of 2 ranks has 1 chunks"):
        pipelinable.partition(1, 2, 0)
    with pytest.raises(ConfigError, match="partition_method='size'"):
        build_pipeline_model_from_cfg({"type": FromConfig, "depth": 3}, partition_method="size")
    with pytest.raises(ConfigError, match="Found 'Unknown' among models"):
        build_pipeline_model_from_cfg({"type": "Unknown"})
    with pytest.raises(ConfigError, match="subclass of ModelFromConfig"):
        build_pipeline_model_from_cfg({"type": nn.Linear})
    with pytest.raises(ConfigError, match="pipeline_ranks"):
        PipelineSharedModuleWrapper([])


def test_documented_modules_have_these_names() -> None:
    assert importlib.import_module("colossal.builder.pipeline").partition_uniform is partition_uniform
    assert importlib.import_module("colossal.builder").build_pipeline_model is build_pipeline_model
    assert importlib.import_module("colossal.pipeline.pipelinable").PipelinableContext is PipelinableContext
    assert importlib.import_module("colossal.pipeline.utils").partition_balanced is partition_balanced
    assert importlib.import_module("colossal.pipeline").partition_uniform is partition_over_stages


class InOrder(nn.Module):
    """Modules that run in the order in which they are assigned, some of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))])
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_model_is_partitioned_in_the_order_of_its_modules() -> None:
    torch.manual_seed(0)
    context = PipelinableContext(policy="uniform")
    with context:
        model = InOrder()
    context.to_layer_list()
    assert context.layers_count == 5
    first = context.partition(1, 2, 0)
    torch.manual_seed(0)
    other = PipelinableContext(policy="uniform")
    with other:
        _again = InOrder()
    other.to_layer_list()
    second = other.partition(1, 2, 1)
    names = [sorted(name for name, _ in stage.named_parameters()) for stage in (first, second)]
    assert names[0] == ["blocks.0.bias", "blocks.0.weight", "embed.bias", "embed.weight"]
    assert names[1] == ["blocks.1.1.bias", "blocks.1.1.weight", "head.bias", "head.weight"]
    assert isinstance(model, nn.Module)


def test_a_model_is_partitioned_as_often_as_a_program_asks() -> None:
    with PipelinableContext(policy="uniform") as context:
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    context.to_layer_list()
    chunks = [context.partition(1, 2, rank) for rank in (0, 1, 0, 1)]
    names = [[name for name, _ in chunk.named_parameters()] for chunk in chunks]
    assert names == [["0.weight", "0.bias"], ["2.weight", "2.bias"]] * 2
    for first, again in zip(chunks[:2], chunks[2:], strict=True):
        for one, other in zip(first.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)
    context.policy = "balanced"
    assert len(list(context.partition(1, 1, 0).parameters())) == 4


def test_several_models_need_an_order() -> None:
    context = PipelinableContext()
    with context:
        models = InOrder(), Net()
    with pytest.raises(ConfigError, match=r"Found 2 of them among .*Pass exec_seq"):
        context.to_layer_list()
    assert len(models) == 2
