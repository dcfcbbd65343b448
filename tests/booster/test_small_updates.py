"""A model in 16 bits, as transformers loads most, keeps updates that 16 bits would round away, or boost warns."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from colossal._src.booster.argument_checks import _warn_of_lost_updates
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.lazy import LazyInitContext
from colossal.testing import run_processes

Case = tuple[Callable[[], Plugin | None], str | None]
KEEPS: dict[str, Case] = {
    "none": (lambda: None, "bf16"),
    "none fp16": (lambda: None, "fp16"),
    "DDP": (TorchDDPPlugin, "bf16"),
    "FSDP": (TorchFSDPPlugin, "bf16"),
    "FSDP lazy": (TorchFSDPPlugin, "bf16"),
    "ZeRO-1": (lambda: LowLevelZeroPlugin(1, "fp32"), None),
    "Gemini": (lambda: GeminiPlugin(precision="bf16"), None),
    "hybrid": (lambda: HybridParallelPlugin(1, 1, precision="bf16"), None),
}
WARNS: dict[str, Case] = {
    "none": (lambda: None, None),
    "DDP": (TorchDDPPlugin, None),
    "FSDP": (TorchFSDPPlugin, None),
    "hybrid": (lambda: HybridParallelPlugin(1, 1, precision="fp32"), None),
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()
    model[0].requires_grad_(False)
    return model


def train(
    make_plugin: Callable[[], Plugin | None], precision: str | None, is_lazy: bool
) -> tuple[float, Any, list[str]]:
    """Return how far a weight of 1.0 moves in 20 steps, the dtype of frozen weights, and what is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("colossal").addHandler(handler)
    _warn_of_lost_updates.cache_clear()
    if is_lazy:
        with LazyInitContext():
            model = build()
    else:
        model = build()
    frozen, optimizer = model[0].weight, torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=1e-4)
    booster = Booster(device="cpu", mixed_precision=precision, plugin=make_plugin())
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    for _ in range(20):
        booster.backward(boosted(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum(), wrapped)
        wrapped.step()
        wrapped.zero_grad()
    logging.getLogger("colossal").removeHandler(handler)
    values: list[Any] = [getattr(each, "full_tensor", lambda each=each: each)() for each in wrapped.parameters]
    distances = torch.cat([(each.detach().float() - 1).abs().flatten() for each in values])
    moved = max(distances[distances < 0.1].tolist(), default=0.0)  # of the normalization, if this rank has some
    return moved, frozen.dtype, [line for line in lines if "rounded away" in line]


def train_all(_: None) -> tuple[dict[str, Any], dict[str, Any]]:
    kept = {name: train(*each, is_lazy="lazy" in name) for name, each in KEEPS.items()}
    return kept, {name: train(*each, is_lazy=False) for name, each in WARNS.items()}


def test_updates_are_kept_or_boost_warns() -> None:
    ranks = run_processes(train_all, 2, None)
    for kept, _ in ranks:
        for name, (_, frozen, lines) in kept.items():
            assert 5e-4 < max(each[name][0] for each, _ in ranks) < 5e-3, name
            assert not lines, name
            if name not in ("ZeRO-1", "Gemini", "hybrid"):  # which cast all of a model
                assert frozen == torch.bfloat16, name
    for name, (_, _, lines) in ranks[0][1].items():
        assert len(lines) == 1, name
        remedy = "HybridParallelPlugin(precision='bf16')" if name == "hybrid" else "Booster(mixed_precision='bf16')"
        assert remedy in lines[0], name
    assert not any(lines for *_, lines in ranks[1][1].values())
