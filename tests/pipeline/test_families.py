"""Pipelines against one process, on real processes: loss, outputs and every gradient, of every family and schedule."""

from typing import Any

import pytest
import torch
from families import MODELS, build, inputs_of
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.interface import OptimizerWrapper
from colossal.pipeline import (
    Microbatching,
    PipelineExecutor,
    PipelineStyle,
    Placement,
    Stage,
    copy_structure,
    partition_uniform,
)
from colossal.shardformer import plan_of
from colossal.testing import run_processes

STYLES: list[PipelineStyle] = ["1f1b", "interleaved", "zbv"]
NO_STAGES = ("t5", "whisper", "sam", "blip-2-opt", "blip-2-t5")
FAMILIES = [name for name in MODELS if name not in NO_STAGES]
NUM_MICROBATCHES = 2


def loss_of(outputs: Any, _inputs: Any) -> torch.Tensor:
    return outputs.loss


def pipeline_of(model: nn.Module, style: PipelineStyle, mesh: ParallelMesh) -> tuple[PipelineExecutor, list[Stage]]:
    placement = Placement(mesh.size("pp"), 1 if style == "1f1b" else 2, is_v=style == "zbv")
    plan, config = plan_of(model).stages, getattr(model, "config", None)
    assert plan is not None
    layers = partition_uniform(getattr(config, "num_hidden_layers", 0), placement.num_stages)
    own = placement.stages_of(mesh.rank("pp"))
    stages = [Stage.of_model(copy_structure(model), plan, layers, index) for index in own]
    return PipelineExecutor(stages, placement, mesh, style, Microbatching(NUM_MICROBATCHES)), stages


def train(style: PipelineStyle, size: int, num_layers: int) -> dict[str, dict[str, Any]]:
    """Make a step of every family in one world."""
    with ParallelMesh(pp=size) as mesh:
        return {name: step(build(name, num_layers=num_layers), name, style, mesh) for name in FAMILIES}


def step(model: nn.Module, name: str, style: PipelineStyle, mesh: ParallelMesh) -> dict[str, Any]:
    run, stages = pipeline_of(model, style, mesh)
    parameters = {id(p): p for stage in stages for p in stage.parameters()}
    optimizer = OptimizerWrapper(torch.optim.SGD(parameters.values(), lr=0.1))
    done = run(iter([inputs_of(name)]), loss_of, optimizer, return_outputs=True)
    grads = {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.module.named_parameters(remove_duplicate=False)
    }
    return {"loss": done["loss"], "logits": done["outputs"].logits if done["outputs"] else None, "grads": grads}


@pytest.fixture(scope="module", params=STYLES)
def world(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, dict[str, Any]]]]:
    num_layers = 3 if request.param == "1f1b" else 5
    return num_layers, run_processes(train, 2, request.param, 2, num_layers, timeout_seconds=200)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_one_process(name, world) -> None:
    num_layers, ranks = world
    alone = build(name, num_layers=num_layers)
    losses, logits = [], []
    for index in range(NUM_MICROBATCHES):
        outputs = alone(**{key: value.chunk(NUM_MICROBATCHES)[index] for key, value in inputs_of(name).items()})
        (outputs.loss / NUM_MICROBATCHES).backward()
        losses.append(outputs.loss.detach() / NUM_MICROBATCHES)
        logits.append(outputs.logits.detach())
    found: dict[str, Any] = {}
    for rank in ranks:
        torch.testing.assert_close(rank[name]["loss"], sum(losses), rtol=1e-12, atol=0)
        found |= rank[name]["grads"]
    (seen,) = [rank[name]["logits"] for rank in ranks if rank[name]["logits"] is not None]
    torch.testing.assert_close(seen, torch.cat(logits), rtol=1e-12, atol=1e-14)
    expected = {key: parameter.grad for key, parameter in alone.named_parameters(remove_duplicate=False)}
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")
