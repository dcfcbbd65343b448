"""Gemini over models of distributed parameters trains as one process does."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from colo_models import loss_of, make_model, tensor_parallelize, tokens_of
from equality import assert_equal
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.booster import plugin as plugins
from colossal.errors import ConfigError
from colossal.legacy.tensor import ColoInitContext, ProcessGroup
from colossal.tensor import full_tensor_of
from colossal.testing import WorldError, run_threads
from colossal.zero.gemini import GeminiAdamOptimizer, GeminiDDP

SIZE = 4


def train_one_process(max_norm: float = 0.0) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    losses: list[torch.Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        tokens = tokens_of(step, SIZE)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        losses.append(loss.detach())
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def train_gemini(
    tp: int, max_norm: float, options: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    options = dict(options)
    checkpoint, rows = options.pop("checkpoint", False), options.pop("rows", False)
    group = ProcessGroup(tp_degree=tp)
    with ColoInitContext(device="cpu", dtype=torch.float64, default_pg=group):
        model: Any = make_model(recompute=checkpoint)
    tensor_parallelize(model, group, vocabulary_rows=rows)
    wrapped = GeminiDDP(
        model,
        device=torch.device("cpu"),
        pin_memory=True,
        search_range_mb=1,
        min_chunk_size_m=0.0001,
        mixed_precision=None,
        **options,
    )
    optimizer = GeminiAdamOptimizer(wrapped, lr=0.05, max_norm=max_norm)
    per_replica = SIZE // group.dp_world_size()
    losses: list[torch.Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        tokens = tokens_of(step, SIZE)[group.dp_local_rank() * per_replica :][:per_replica]
        loss = loss_of(wrapped(tokens), tokens)
        optimizer.backward(loss)
        mean = torch.tensor(loss.item(), dtype=torch.float64)
        dist.all_reduce(mean, group=group.dp_process_group())
        losses.append(mean / group.dp_world_size())
        optimizer.step()
    return losses, wrapped.state_dict(only_rank_0=False)


@pytest.mark.parametrize(
    ("tp", "ranks", "max_norm", "options"),
    [
        (1, 2, 0.0, {"placement_policy": "cpu"}),
        (2, 2, 0.1, {"placement_policy": "cuda"}),
        (2, 4, 0.1, {"placement_policy": "auto", "checkpoint": True}),
        (4, 4, 0.0, {"placement_policy": "cpu", "rows": True}),
    ],
)
def test_gemini_trains_as_one_process(tp: int, ranks: int, max_norm: float, options: dict[str, Any]) -> None:
    wanted_losses, wanted = train_one_process(max_norm)
    for losses, values in run_threads(train_gemini, ranks, tp, max_norm, options):
        for step, (loss, expected) in enumerate(zip(losses, wanted_losses, strict=True)):
            assert_equal(loss, expected, f"loss of step {step}")
        for name, expected in wanted.items():
            assert_equal(values[name], expected, name)


# ------------------------------------------------------------------------------------------ under a Booster


def boost(plugin: str, options: dict[str, Any], enters: bool) -> dict[str, torch.Tensor]:
    group = ProcessGroup(tp_degree=2)
    with ColoInitContext(device="cpu", dtype=torch.float64, default_pg=group):
        model = make_model()
    tensor_parallelize(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    with group.mesh if enters else nullcontext():
        booster = Booster(plugin=getattr(plugins, plugin)(**options), max_norm=0.1)
        return train_boosted(booster, *booster.boost(model, optimizer)[:2], group)


def train_boosted(booster: Booster, model: Any, optimizer: Any, group: ProcessGroup) -> dict[str, torch.Tensor]:
    per_replica = SIZE // group.dp_world_size()
    for step in range(3):
        optimizer.zero_grad()
        tokens = tokens_of(step, SIZE)[group.dp_local_rank() * per_replica :][:per_replica]
        booster.backward(loss_of(model(tokens), tokens), optimizer)
        optimizer.step()
    if isinstance(model, GeminiDDP):
        return model.state_dict(only_rank_0=False)
    return {name: full_tensor_of(value).clone() for name, value in model.unwrap().named_parameters()}


GEMINI = {"precision": "fp32", "min_chunk_size_m": 0.0001, "search_range_m": 1}


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        ("GeminiPlugin", GEMINI),
        ("TorchDDPPlugin", {}),
        ("LowLevelZeroPlugin", {"stage": 2, "precision": "fp32"}),
    ],
)
def test_booster_trains_inside_of_the_mesh(plugin: str, options: dict[str, Any]) -> None:
    _, wanted = train_one_process(0.1)
    for values in run_threads(boost, 4, plugin, options, True):
        for name, expected in values.items():
            assert_equal(expected, wanted[name], name)


@pytest.mark.parametrize(("plugin", "options"), [("GeminiPlugin", GEMINI), ("TorchDDPPlugin", {})])
def test_booster_outside_of_the_mesh_is_refused(plugin: str, options: dict[str, Any]) -> None:
    with pytest.raises(WorldError, match=f"{ConfigError.__name__}.*over the mesh that its plugin uses"):
        run_threads(boost, 4, plugin, options, False)


def wrap_over_all_ranks() -> None:
    group = ProcessGroup(tp_degree=2)
    with ColoInitContext(device="cpu", default_pg=group):
        model = make_model()
    tensor_parallelize(model, group)
    GeminiDDP(model, zero_group=dist.group.WORLD)


def test_chunks_over_ranks_with_different_shards_are_refused() -> None:
    with pytest.raises(WorldError, match="hold different shards of wte.weight"):
        run_threads(wrap_over_all_ranks, 2)
