"""Pipelines against one process, on real processes: loss, outputs and every gradient, of every family and schedule."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from families import MODELS, build, inputs_of, results_of
from float64 import KeepFloat64
from torch import nn

from colossal._src.pipeline import Microbatching, PipelineExecutor, PipelineStyle, Stage, copy_structure
from colossal.cluster import ParallelMesh
from colossal.interface import OptimizerWrapper
from colossal.pipeline import StagePlacement, count_layers, partition_uniform
from colossal.shardformer import plan_of
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

STYLES: list[PipelineStyle] = ["1f1b", "interleaved", "zbv"]
FAMILIES = tuple(MODELS)
SEVERAL_LISTS = ("t5", "whisper")
WORLDS: dict[str, tuple[PipelineStyle, int, int, tuple[str, ...]]] = {  # schedule, ranks, layers, families
    "1f1b": ("1f1b", 2, 3, FAMILIES),
    "interleaved": ("interleaved", 2, 5, FAMILIES),
    "zbv": ("zbv", 2, 5, FAMILIES),
    "1f1b-4": ("1f1b", 4, 3, SEVERAL_LISTS),
    "interleaved-4": ("interleaved", 4, 5, SEVERAL_LISTS),
    "zbv-4": ("zbv", 4, 5, SEVERAL_LISTS),
}
CASES = [(world, name) for world, (*_, names) in WORLDS.items() for name in names]


def loss_of(outputs: Any, _inputs: Any) -> torch.Tensor:
    if "pred_masks" in outputs:
        return outputs.pred_masks.square().mean() + outputs.iou_scores.sum()
    return outputs.loss


def logits_of(outputs: Any) -> torch.Tensor:
    return outputs.pred_masks if "pred_masks" in outputs else outputs.logits


def pipeline_of(
    model: nn.Module, style: PipelineStyle, mesh: ParallelMesh, num_microbatches: int
) -> tuple[PipelineExecutor, list[Stage]]:
    placement = StagePlacement(mesh.size("pp"), 1 if style == "1f1b" else 2, is_v=style == "zbv")
    plan = plan_of(model).stages
    assert plan is not None
    layers = partition_uniform(count_layers(model, plan), placement.num_stages)
    own = placement.stages_of(mesh.rank("pp"))
    stages = [Stage.of_model(copy_structure(model), plan, layers, index) for index in own]
    return PipelineExecutor(stages, placement, mesh, style, Microbatching(num_microbatches)), stages


def batch_of(name: str, num_parts: int) -> dict[str, torch.Tensor]:
    """Two samples for each two micro-batches."""
    parts = [inputs_of(name, num_changed=index) for index in range(num_parts // 2)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def train(world: str) -> dict[str, dict[str, Any]]:
    """Make a step of every family in one world."""
    style, size, num_layers, names = WORLDS[world]
    with ParallelMesh(pp=size) as mesh, KeepFloat64():
        return {name: step(build(name, num_layers=num_layers), name, style, mesh) for name in names}


def step(model: nn.Module, name: str, style: PipelineStyle, mesh: ParallelMesh) -> dict[str, Any]:
    size = mesh.size("pp")
    run, stages = pipeline_of(model, style, mesh, size)
    parameters = {id(p): p for stage in stages for p in stage.parameters()}
    optimizer = OptimizerWrapper(torch.optim.SGD(parameters.values(), lr=0.1))
    done = run(iter([batch_of(name, size)]), loss_of, optimizer, return_outputs=True)
    grads = {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.module.named_parameters(remove_duplicate=False)
    }
    return {"loss": done["loss"], "logits": logits_of(done["outputs"]) if done["outputs"] else None, "grads": grads}


@cache
def ranks_of(world: str) -> list[dict[str, dict[str, Any]]]:
    return run_processes(train, WORLDS[world][1], world)


def alone(name: str, num_layers: int, num_parts: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Loss, outputs and gradients of one process."""
    model, batch = build(name, num_layers=num_layers), batch_of(name, num_parts)
    losses, logits = [], []
    for index in range(num_parts):
        loss, each = results_of(model, {key: value.chunk(num_parts)[index] for key, value in batch.items()})
        (loss / num_parts).backward()
        losses.append(loss.detach() / num_parts)
        logits.append(each.detach())
    grads = {key: parameter.grad for key, parameter in model.named_parameters(remove_duplicate=False)}
    return torch.stack(losses).sum(), torch.cat(logits), grads


def check_grads(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        if grad is None:  # such as a table of positions that is not trained
            assert found[key] is None, key
        else:
            torch.testing.assert_close(
                found[key], grad, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.parametrize(("world", "name"), CASES)
def test_equals_one_process(name, world) -> None:
    ranks, (_, size, num_layers, _) = ranks_of(world), WORLDS[world]
    loss, logits, grads = alone(name, num_layers, size)
    found: dict[str, Any] = {}
    for rank in ranks:
        torch.testing.assert_close(rank[name]["loss"], loss, rtol=1e-12, atol=0)
        for key in rank[name]["grads"].keys() & found.keys():
            torch.testing.assert_close(rank[name]["grads"][key], found[key], rtol=0, atol=0)
        found |= rank[name]["grads"]
    (seen,) = [rank[name]["logits"] for rank in ranks if rank[name]["logits"] is not None]
    torch.testing.assert_close(seen, logits, rtol=1e-12, atol=1e-14)
    check_grads(found, grads)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_border_between_layers(name) -> None:
    """Every layer is a stage of its own; values pass from one to the next without being sent."""
    whole, batch = build(name, num_layers=3), inputs_of(name)
    plan = plan_of(whole).stages
    assert plan is not None
    number = count_layers(whole, plan)
    layers = [range(index, index + 1) for index in range(number)]
    stages = [Stage.of_model(copy_structure(whole), plan, layers, index) for index in range(number)]
    carry: Any = None
    with KeepFloat64():
        for stage in stages:
            carry = stage(carry, batch)
        total = loss_of(carry, None)
    total.backward()
    loss, logits = results_of(expected := build(name, num_layers=3), batch)
    loss.backward()
    torch.testing.assert_close(logits_of(carry), logits, rtol=1e-12, atol=1e-14)
    found = {key: each.grad for key, each in whole.named_parameters(remove_duplicate=False)}
    check_grads(found, {key: each.grad for key, each in expected.named_parameters(remove_duplicate=False)})
