"""An engine trains as one process does, in every parallel setting that a config describes."""

from typing import Any

import pytest
import torch
from engine_models import STEPS, train, train_alone
from equality import assert_equal

from colossal.testing import run_processes

DATA, PIPE = {"parallel": {"data": 2}}, {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
ONE_D, GRID = {"size": 2, "mode": "1d"}, {"size": 4, "mode": "2d"}
CLIP, HANDLER = {"clip_grad_norm": 0.1}, [{"type": "DataParallelGradientHandler"}]
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "data": (2, DATA),
    "1d": (2, {"parallel": {"tensor": ONE_D}}),
    "2d": (4, {"parallel": {"tensor": GRID}}),
    "2.5d": (8, {"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}}),
    "3d": (8, {"parallel": {"tensor": {"size": 8, "mode": "3d"}}}),
    "pipeline": (2, {**PIPE, "NUM_MICRO_BATCHES": 4}),
    "interleaved": (2, {**PIPE, "NUM_MICRO_BATCHES": 4, "NUM_CHUNKS": 2}),
    "data, pipeline, tensor": (8, {"parallel": {"pipeline": 2, "tensor": ONE_D}, "NUM_MICRO_BATCHES": 2, **CLIP}),
    "2d, pipeline": (8, {"parallel": {"pipeline": 2, "tensor": GRID}, "NUM_MICRO_BATCHES": 2, **CLIP}),
    "data, interleaved": (4, {**PIPE, "NUM_CHUNKS": 2, "gradient_accumulation": 2}),
    "1d, interleaved": (4, {"parallel": {"pipeline": 2, "tensor": ONE_D}, "NUM_MICRO_BATCHES": 2, "NUM_CHUNKS": 2}),
    "data, 2d": (8, {"parallel": {"tensor": GRID}, "gradient_accumulation": 2}),
    "accumulation": (2, {**DATA, "gradient_accumulation": 4}),
    "clipping": (2, {**DATA, **CLIP}),
    "clipping, 1d": (2, {"parallel": {"tensor": ONE_D}, "gradient_accumulation": 2, **CLIP}),
    "clipping, 2d": (4, {"parallel": {"tensor": GRID}, **CLIP}),
    "clipping, 2.5d": (8, {"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, **CLIP}),
    "clipping, 3d": (8, {"parallel": {"tensor": {"size": 8, "mode": "3d"}}, **CLIP}),
    "clipping, interleaved": (2, {**PIPE, "NUM_CHUNKS": 2, **CLIP}),
    "accumulation, pipeline": (2, {**PIPE, "gradient_accumulation": 2}),
    "accumulation, 3d": (8, {"parallel": {"tensor": {"size": 8, "mode": "3d"}}, "gradient_accumulation": 2}),
    "handler, 1d": (4, {"parallel": {"tensor": ONE_D}, "gradient_handler": HANDLER}),
    "accumulation, clipping, pipeline": (4, {**PIPE, "gradient_accumulation": 2, **CLIP}),
    "handler": (2, {**DATA, "gradient_handler": HANDLER, "gradient_accumulation": 2}),
    "handler, pipeline": (4, {**PIPE, "gradient_handlers": HANDLER}),
    "options of torch": (2, {**DATA, "torch_ddp": {"find_unused_parameters": True}, "cudnn_benchmark": True}),
}


BY_RANKS = [pytest.param(name, marks=[pytest.mark.slow] if size >= 8 else []) for name, (size, _) in SETTINGS.items()]


@pytest.mark.parametrize("name", BY_RANKS)
def test_an_engine_equals_one_process(name: str) -> None:
    size, config = SETTINGS[name]
    expected, ranks = train_alone(config.get("clip_grad_norm", 0.0)), run_processes(train, size, config)
    for step in range(STEPS):
        losses = torch.stack([rank["losses"][step] for rank in ranks])
        assert_equal(losses.mean(), expected["losses"][step], f"loss of step {step}")
    for kind in ("grads", "parameters"):
        assert {key for rank in ranks for key in rank[kind]} == expected[kind].keys()
        for rank in ranks:
            for key, value in rank[kind].items():
                assert_equal(value, expected[kind][key], f"{kind}: {key}")
