# pyright: reportMissingImports=false
"""A trainer and its hooks do what a loop over the engine does, in every parallel setting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import WIDTH, blocks, own_part, sgd, wholes_of
from torch import nn

from colossal._src.cluster import set_current_config
from colossal.legacy import initialize
from colossal.legacy.amp import AMP_TYPE
from colossal.legacy.context import global_context
from colossal.legacy.engine import Engine
from colossal.legacy.utils import MultiTimer, get_dataloader, is_no_pp_or_last_stage
from colossal.legacy.zero import TensorShardStrategy
from colossal.testing import run_processes
from colossal.trainer import Trainer, hooks

SAMPLES, BATCH, EPOCHS = 16, 8, 2
PIPE, ONE_D, CLIP = {"NUM_MICRO_BATCHES": 2}, {"size": 2, "mode": "1d"}, {"clip_grad_norm": 0.05}
EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, {"parallel": {"tensor": ONE_D}}),
    "2d": (4, {"parallel": {"tensor": {"size": 4, "mode": "2d"}}, **CLIP}),
    "data, 1d, accumulation": (4, {"parallel": {"tensor": ONE_D}, "gradient_accumulation": 2, **CLIP}),
    "interleaved": (2, {"parallel": {"pipeline": 2}, **PIPE, "NUM_CHUNKS": 2}),
    "data, pipeline, accumulation": (4, {"parallel": {"pipeline": 2}, **PIPE, "gradient_accumulation": 2, **CLIP}),
    "1d, pipeline": (4, {"parallel": {"pipeline": 2, "tensor": ONE_D}, **PIPE}),
    "data, 1d, pipeline": (8, {"parallel": {"pipeline": 2, "tensor": ONE_D}, **PIPE}),
    "3d": (8, {"parallel": {"tensor": {"size": 8, "mode": "3d"}}}),
}
SCALED: dict[str, tuple[int, dict[str, Any]]] = {
    "torch": (2, {"parallel": {"data": 2}, "fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 64.0}, **CLIP}),
    "naive, pipeline": (2, {"parallel": {"pipeline": 2}, **PIPE, "fp16": {"mode": AMP_TYPE.NAIVE}, **CLIP}),
    "zero": (
        2,
        {
            "parallel": {"data": 2},
            "zero": {
                "model_config": {"shard_strategy": TensorShardStrategy()},
                "optimizer_config": {"initial_scale": 64},
            },
            "gradient_accumulation": 2,
        },
    ),
}


def dataset(dtype: torch.dtype) -> torch.utils.data.TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=draws, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x.to(dtype), torch.randint(WIDTH, (SAMPLES,), generator=draws))


def count_right(logits: torch.Tensor, labels: torch.Tensor) -> int:
    """Of whole logits, as the models here return them in every mode."""
    return int((logits.argmax(-1) == labels).sum())


def make(config: dict[str, Any]) -> tuple[Engine, Any, Any]:
    global_context.load_config(dict(config))
    global_context.init_parallel_groups()
    size = BATCH // global_context.data_parallel_size // config.get("gradient_accumulation", 1)
    part = own_part(config)
    optimizer = sgd(part.parameters())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    data = dataset(next(part.parameters()).dtype)
    engine, train, _, schedule = initialize(
        part, optimizer, nn.CrossEntropyLoss(), get_dataloader(data, batch_size=size), None, rates, verbose=False
    )
    return engine, train, schedule


def fit(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """By a trainer with hooks."""
    try:
        engine, train, schedule = make(config)
        timer = MultiTimer()
        trainer, loss = Trainer(engine, timer), hooks.LossHook()
        used: list[Any] = [
            loss,
            hooks.AccuracyHook(count_right),
            hooks.LRSchedulerHook(schedule, by_epoch=False),
            hooks.ThroughputHook(),
            hooks.LogMetricByEpochHook(),
            hooks.LogTimingByEpochHook(timer),
            hooks.LogMemoryByEpochHook(),
        ]
        if "zero" not in config:
            used.append(hooks.SaveCheckpointHook(1, folder))
        trainer.fit(train, EPOCHS, hooks=used)
        found: dict[str, Any] = {"lr": schedule.get_last_lr(), "steps": (trainer.cur_epoch, trainer.cur_step)}
        if is_no_pp_or_last_stage():
            metrics = trainer.metrics("train")
            found["loss"] = metrics["Loss"].get_accumulated_value()
            found["accuracy"] = metrics["Accuracy"].get_accumulated_value()
        return found | ({} if "zero" in config else {"parameters": wholes_of(engine.model)})
    finally:
        set_current_config(None)


def loop(config: dict[str, Any]) -> dict[str, Any]:
    """By nothing but the engine; losses and counts of the last epoch on this rank."""
    try:
        engine, train, schedule = make(config)
        losses, right = list[float](), 0.0
        engine.train()
        for epoch in range(EPOCHS):
            batches = iter(train)
            for _ in range(len(train)):
                engine.zero_grad()
                output, label, loss = engine.execute_schedule(batches)
                engine.step()
                schedule.step()
                if epoch == EPOCHS - 1 and output is not None:
                    assert loss is not None
                    losses.append(loss.item())
                    right += count_right(output, label)
        found: dict[str, Any] = {"lr": schedule.get_last_lr()}
        if losses:
            found |= {"loss": sum(losses) / len(losses), "right": right}
        return found | ({} if "zero" in config else {"parameters": wholes_of(engine.model)})
    finally:
        set_current_config(None)


def alone(clip: float) -> tuple[dict[str, torch.Tensor], float, float, float]:
    """By nothing but torch: parameters, the mean loss and the accuracy of the last epoch, and the learning rate."""
    model, criterion = blocks(*range(4)), nn.CrossEntropyLoss()
    optimizer = sgd(model.parameters())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    x, y = dataset(torch.float64).tensors
    losses, right = list[float](), 0
    for _ in range(EPOCHS):
        losses, right = [], 0
        for part, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            output = model(part)
            loss = criterion(output, labels)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            rates.step()
            losses.append(loss.item())
            right += count_right(output, labels)
    return wholes_of(model), sum(losses) / len(losses), right / SAMPLES, float(rates.get_last_lr()[0])


def slow_from_eight(settings: dict[str, tuple[int, dict[str, Any]]]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if size >= 8 else []) for name, (size, _) in settings.items()]


@pytest.mark.parametrize("name", slow_from_eight(EXACT))
def test_a_trainer_equals_one_process(name: str, tmp_path: Path) -> None:
    size, config = EXACT[name]
    parameters, loss, accuracy, rate = alone(config.get("clip_grad_norm", 0.0))
    ranks = run_processes(fit, size, config, tmp_path)
    assert {key for rank in ranks for key in rank["parameters"]} == parameters.keys()
    for rank in ranks:
        for key, value in rank["parameters"].items():
            torch.testing.assert_close(value, parameters[key], rtol=1e-9, atol=1e-12)
        assert rank["lr"] == [rate]
    with_outputs = [rank for rank in ranks if "loss" in rank]
    assert with_outputs
    for rank in with_outputs:
        assert rank["loss"] == pytest.approx(loss, rel=1e-9)
        assert rank["accuracy"] == accuracy
    saved = torch.load(tmp_path / f"epoch_{EPOCHS - 1}.pt", weights_only=True)
    assert saved["epoch"] == EPOCHS - 1
    assert sum(value.numel() for value in saved["model"].values()) == sum(map(torch.numel, parameters.values()))


@pytest.mark.parametrize("name", SCALED)
def test_a_trainer_equals_a_loop_over_the_engine(name: str, tmp_path: Path) -> None:
    size, config = SCALED[name]
    fitted, looped = run_processes(fit, size, config, tmp_path), run_processes(loop, size, config)
    for one, other in zip(fitted, looped, strict=True):
        assert one["lr"] == other["lr"]
        for key, value in one.get("parameters", {}).items():
            assert torch.equal(value, other["parameters"][key])
    losses = [each["loss"] for each in looped if "loss" in each]
    seen = SAMPLES * len(losses) // config["parallel"].get("data", 1)
    for rank in (each for each in fitted if "loss" in each):
        assert rank["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert rank["accuracy"] == sum(each["right"] for each in looped if "right" in each) / seen
