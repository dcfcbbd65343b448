# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""The equality matrix of models of transformers, which plugins divide: every mesh, clipping and optimizer.

What is compared is what `test_equality_matrix.py` compares.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from equality_cells import (
    CHUNKED,
    DEVICE,
    DIVIDED,
    STEPS,
    WAYS,
    compare,
    gemini,
    grads,
    hybrid,
    marked,
    size_of,
)
from families import build as build_family
from families import inputs_of
from float64 import KeepFloat64

from colossal._src.tensor import backing_shard
from colossal.booster import Booster
from colossal.cluster import ParallelMesh
from colossal.tensor import full_tensor_of
from colossal.testing import run_processes, run_threads


def family_of(world: str) -> str:
    """A mesh with an ep axis needs experts."""
    return "mixtral" if "ep" in world else "llama-tied"


def family_batches(step: int, count: int, place: tuple[int, int]) -> Iterator[dict[str, torch.Tensor]]:
    """Eight samples, in parts, and of these what this rank gets."""
    inputs = [inputs_of("llama", num_changed=step + 4 * number) for number in range(4)]
    batch = {key: torch.cat([each[key] for each in inputs]).to(DEVICE) for key in inputs[0]}
    for part in range(count):
        yield {key: value.chunk(count)[part].chunk(place[1])[place[0]] for key, value in batch.items()}


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def train_family(family: str, world: str | None, name: str, **more: Any) -> dict[str, Any]:
    """The same of a causal language model, whose layers the plugin divides; of None, in one process."""
    way = WAYS[name]
    sizes, options = ({}, {}) if world is None else (DIVIDED | CHUNKED)[world]
    clips = way.in_step if world is not None else None
    with ParallelMesh(**sizes) as mesh:
        make = gemini if world in CHUNKED else hybrid
        plugin = None if world is None else make(mesh, precision="fp32", **options, **(clips or {}), **more)
        booster = Booster(device=DEVICE, plugin=plugin)
        model: Any = build_family(family)
        model, optimizer, criterion, *_ = booster.boost(model, way.optimizer(model.parameters()), loss_of)
        place, losses, norms, seen = booster.plugin.data_parallel_rank_and_size(), [], [], dict[str, torch.Tensor]()
        for step in range(STEPS):
            for batch in family_batches(step, way.accumulate, place):
                scaled = lambda outputs, inputs: criterion(outputs, inputs) / way.accumulate  # noqa: E731
                losses.append(booster.execute_pipeline(iter([batch]), model, scaled, optimizer)["loss"].item())
            norms.append(optimizer.get_grad_norm())
            seen |= {f"gradient of {key} in step {step}": grad for key, grad in grads(optimizer).items()}
            if clips is None:
                way.clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()
        working = {} if optimizer.masters is None else optimizer.masters.pairs
        seen |= {
            optimizer.param_names[each]: full_tensor_of(backing_shard(working.get(each, each))).detach().clone()
            for each in optimizer.parameters
        }
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "values": seen,
    }


MOST_WAYS = {
    "some ways": (("1-norm", "2-norm, in the step", "value", "accumulation", "Lamb", "Adafactor"), ("2-norm", "Lamb")),
    "others": (("plain", "2-norm", "largest", "Lars", "GaLore", "CAME", "HybridAdam"), ()),
}
"""Ways without and with ZeRO-1; the former are in the gate, and those of layers of `colossal.nn` are so all."""


def train_family_all(world: str, some: str) -> dict[tuple[str, int], dict[str, Any]]:
    plain, with_zero = MOST_WAYS[some]
    stages = [{}] if world in CHUNKED else [{"zero_stage": 0}, {"zero_stage": 1}]
    with KeepFloat64():
        return {
            (name, stage): train_family(family_of(world), world, name, **options)
            for stage, (names, options) in enumerate(zip((plain, with_zero), stages, strict=False))
            for name in names
        }


@cache
def family_alone(family: str, name: str) -> dict[str, Any]:
    return run_threads(train_one_family, 1, family, name)[0]


def train_one_family(family: str, name: str) -> dict[str, Any]:
    with KeepFloat64():
        return train_family(family, None, name)


@pytest.mark.parametrize("some", ["some ways", pytest.param("others", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", marked([*DIVIDED, *CHUNKED]))
def test_a_divided_transformer_is_one_process(world: str, some: str) -> None:
    ranks = run_processes(train_family_all, size_of((DIVIDED | CHUNKED)[world][0]), world, some)
    for way, stage in ranks[0]:
        expected, found = family_alone(family_of(world), way), [rank[way, stage] for rank in ranks]
        compare(expected, found, f"{world}, {way}, zero_stage={stage}", is_cut=True)
