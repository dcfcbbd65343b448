"""Precisions and ZeRO of a config train as one process together with accumulation, clipping, handlers and pipelines."""

from typing import Any

import pytest
import torch
from engine_models import STEPS, WIDTH, make_engine, sgd, take_step, wholes_of
from equality import assert_within_rounding

from colossal._src.cluster import set_current_config
from colossal.legacy.amp import AMP_TYPE
from colossal.legacy.zero import BucketTensorShardStrategy
from colossal.testing import run_processes

BASES: dict[str, dict[str, Any]] = {
    "torch": {"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 64.0}},
    "naive": {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 64.0}},
    "zero": {
        "zero": {
            "model_config": {"shard_strategy": BucketTensorShardStrategy()},
            "optimizer_config": {"initial_scale": 64},
        }
    },
}
DATA, ONE_D = {"parallel": {"data": 2}}, {"size": 2, "mode": "1d"}
PIPE = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
CLIP, TWICE = {"clip_grad_norm": 0.05}, {"gradient_accumulation": 2}
HANDLER = {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}
SETTINGS: list[tuple[str, int, dict[str, Any]]] = [
    ("torch", 2, DATA | CLIP),
    ("torch", 2, DATA | TWICE),
    ("torch", 2, DATA | HANDLER),
    ("torch", 4, {"parallel": {"tensor": ONE_D}} | CLIP | TWICE),
    ("torch", 4, {"parallel": {"tensor": ONE_D}} | HANDLER | CLIP),
    ("naive", 2, DATA | CLIP | TWICE),
    ("naive", 2, DATA | HANDLER),
    ("naive", 4, {"parallel": {"tensor": {"size": 4, "mode": "2d"}}} | CLIP),
    ("naive", 2, PIPE | CLIP),
    ("naive", 2, PIPE | TWICE),
    ("naive", 2, PIPE | {"NUM_CHUNKS": 2} | CLIP | TWICE),
    ("naive", 4, PIPE | HANDLER | CLIP),
    ("naive", 8, PIPE | {"parallel": {"pipeline": 2, "tensor": ONE_D}} | CLIP | TWICE),
    ("zero", 2, DATA | CLIP),
    ("zero", 2, DATA | TWICE),
    ("zero", 4, {"parallel": {"tensor": ONE_D}} | CLIP | TWICE),
]


def name_of(base: str, size: int, options: dict[str, Any]) -> str:
    return ", ".join([base, *(f"{key}={value}" for key, value in options.items()), str(size)])


def outcome(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Losses, and after the steps what the model makes of unit vectors; of a pipeline the whole parameters."""
    try:
        engine = make_engine(config, sgd)
        losses = torch.stack([take_step(engine, step) for step in range(STEPS)])
        found = {"losses": losses}
        if "zero" not in config:
            found |= wholes_of(engine.model)
        if not engine.uses_pipeline:
            engine.eval()
            dtype = torch.float64 if losses.dtype == torch.float64 else torch.float32
            with torch.no_grad():
                found["outputs"] = engine(torch.eye(WIDTH, dtype=dtype))
        return found
    finally:
        set_current_config(None)


@pytest.mark.parametrize(
    ("base", "size", "options"),
    [pytest.param(*each, id=name_of(*each), marks=[pytest.mark.slow] if each[1] >= 8 else []) for each in SETTINGS],
)
def test_a_precision_crosses_other_features(base: str, size: int, options: dict[str, Any]) -> None:
    clip = {key: value for key, value in options.items() if key in CLIP}
    (alone,), (exact,) = run_processes(outcome, 1, BASES[base] | clip), run_processes(outcome, 1, clip)
    ranks = run_processes(outcome, size, BASES[base] | options)
    if clip:
        (unclipped,) = run_processes(outcome, 1, {})
        assert (unclipped["losses"] - exact["losses"]).abs().max() > 10 * (
            alone["losses"] - exact["losses"]
        ).abs().max()
    mean = torch.stack([rank.pop("losses") for rank in ranks]).mean(0)
    assert_within_rounding(mean, alone.pop("losses"), exact["losses"], torch.float16, "losses")
    found = {key for rank in ranks for key in rank}
    assert found | {"outputs"} == alone.keys()
    for rank in ranks:
        for key, value in rank.items():
            assert_within_rounding(value, alone[key], exact[key], torch.float16, key)
