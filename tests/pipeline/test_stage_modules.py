# pyright: reportArgumentType=false
"""Stages that the user built on each rank equal one process: loss, every gradient, parameters after three steps."""

from functools import cache
from typing import Any

import pytest
import torch
from equality import assert_equal
from torch import nn
from torch.nn import functional

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.pipeline import StageModules, StagePlacement, partition_uniform
from colossal.testing import run_processes

pytestmark = pytest.mark.slow

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH, STEPS = 12, 8, 4, 8, 5, 3

WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp_size": 2}),
    "pp4": (4, {"pp_size": 4}),
    "pp2-dp2": (4, {"pp_size": 2}),
    "pp2-interleaved": (2, {"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2}),
    "pp2-v": (2, {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2}),
    "pp2-dp2-zero1-clipped": (4, {"pp_size": 2, "zero_stage": 1, "max_norm": 0.05}),
    "pp2-dp2-clipped": (4, {"pp_size": 2, "max_norm": 0.05, "dp_outside": False}),
}


class Block(nn.Module):
    """Uses a mask that every stage gets by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * mask[..., None]


class Chunk(nn.Module):
    """A stage as the documented GPT has it: what the previous one returns comes first, and every keyword to all."""

    def __init__(self, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.blocks = nn.ModuleList(Block() for _ in layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(
        self, hidden_states: Any = None, input_ids: Any = None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert attention_mask is not None
        if self.embedding is not None:
            assert hidden_states is None
            hidden_states = self.embedding(input_ids)
        for block in self.blocks:
            hidden_states = block(hidden_states, attention_mask)
        return hidden_states if self.head is None else self.head(hidden_states)


class Full(nn.Module):
    """All stages in one process; the head has the weight of the embedding."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__()
        self.stages = nn.Sequential(*chunks)
        assert chunks[0].embedding is not None
        assert chunks[-1].head is not None
        chunks[-1].head.weight = chunks[0].embedding.weight

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        x = None
        for stage in self.stages:
            x = stage(x, input_ids=input_ids, attention_mask=attention_mask)
        return x


def build(index: int, num_stages: int) -> Chunk:
    layers = partition_uniform(LAYERS, num_stages)[index]
    chunk = Chunk(layers, first=index == 0, last=index == num_stages - 1).double()
    draws = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64) * 0.5)
    return chunk


def batch_of(step: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draws)
    mask = (torch.rand(BATCH, LENGTH, generator=draws) < 0.7).double()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.roll(-1, 1)}


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def tied(chunks: list[Chunk], placement: StagePlacement) -> dict[str, nn.Module]:
    """What this rank has of the embedding and the head, if these are on two ranks."""
    if placement.rank_of(placement.num_stages - 1) == placement.rank_of(0):
        if chunks[0].embedding is not None:
            chunks[-1].head.weight = chunks[0].embedding.weight
        return {}
    found = [held for chunk in chunks for held in (chunk.embedding, chunk.head) if held is not None]
    return {"words": found[0]} if found else {}


def boost(options: dict[str, Any], **keywords: Any) -> tuple[Booster, Any, Any, HybridParallelPlugin]:
    plugin = HybridParallelPlugin(**({"tp_size": 1, "precision": "fp32", "num_microbatches": 4} | options))
    placement = plugin._options.placement
    chunks = [build(index, placement.num_stages) for index in placement.stages_of(plugin.mesh.rank("pp"))]
    model = StageModules(chunks, tied=tied(chunks, placement), **keywords)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    booster = Booster("cpu", plugin=plugin)
    boosted, wrapper, *_ = booster.boost(model, optimizer)
    return booster, boosted, wrapper, plugin


def train(options: dict[str, Any]) -> dict[str, Any]:
    booster, model, optimizer, plugin = boost(options)
    index, size = plugin.data_parallel_rank_and_size()
    found: dict[str, Any] = {"losses": [], "grads": {}}
    with torch.no_grad():
        batch = {name: value.chunk(size)[index] for name, value in batch_of(9).items()}
        done = booster.execute_pipeline(iter([batch]), model, loss_of, return_outputs=True)
        found["evaluated"] = done["loss"], done["outputs"]
    for step in range(STEPS):
        batch = {name: value.chunk(size)[index] for name, value in batch_of(step).items()}
        found["losses"].append(booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)["loss"])
        if step == 0 and not plugin._options.zero_stage:
            found["grads"] = {name: parameter.grad.clone() for name, parameter in named_parameters(model).items()}
        found.setdefault("norms", []).append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {name: parameter.detach() for name, parameter in named_parameters(model).items()}
    return found


def named_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of this rank by their names in the full model."""
    stages = [stage.module for stage in model.unwrap().stages]
    return {name: each for stage in stages for name, each in stage.named_parameters(remove_duplicate=False)}


@cache
def one_process(num_stages: int, max_norm: float) -> dict[str, Any]:
    model = Full([build(index, num_stages) for index in range(num_stages)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "norms": []}

    def run(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch_of(step)
        labels = batch.pop("labels")
        outputs = model(**batch)
        return loss_of(outputs, {"labels": labels}), outputs

    found["evaluated"] = run(9)
    for step in range(STEPS):
        loss, _ = run(step)
        loss.backward()
        found["losses"].append(loss.detach())
        if step == 0:
            named = model.stages.named_parameters(remove_duplicate=False)
            found["grads"] = {name: parameter.grad.clone() for name, parameter in named}
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), max_norm or 1e9))
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = dict(model.stages.named_parameters(remove_duplicate=False))
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_stages_that_the_user_built_equal_one_process(world: str) -> None:
    size, options = WORLDS[world]
    ranks = run_processes(train, size, options)
    num_stages = options["pp_size"] * options.get("num_model_chunks", 1)
    expected = one_process(num_stages, options.get("max_norm", 0.0))
    replicas = size // options["pp_size"]
    seen: set[str] = set()
    for step in range(STEPS):
        losses = torch.stack([rank["losses"][step] for rank in ranks])
        assert_equal(losses.mean(), expected["losses"][step], f"loss of step {step}")
    outputs = [rank["evaluated"][1] for rank in ranks if rank["evaluated"][1] is not None]
    assert len(outputs) == replicas
    assert_equal(torch.cat(outputs), expected["evaluated"][1].detach(), "outputs of an evaluation")
    for rank in ranks:
        for norm, wanted in zip(rank["norms"], expected["norms"], strict=True):
            assert_equal(torch.as_tensor(norm, dtype=torch.float64), wanted, "the norm of gradients")
        for name, value in rank["grads"].items():
            assert_equal(value, expected["grads"][name], f"gradient of {name}")
        for name, value in rank["parameters"].items():
            assert_equal(value, expected["parameters"][name].detach(), f"{name} after {STEPS} steps")
            seen.add(name)
    assert seen == expected["parameters"].keys()
