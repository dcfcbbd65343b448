# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""What a run resumes from: schedules of groups in another order, refused parts, master weights, gradients."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import TensorDataset

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossal.errors import CheckpointError, ConfigError
from colossal.testing import run_processes

RATES = {"weight": 0.05, "bias": 0.001}
SCHEDULES: dict[str, Callable[[Any, list[str]], Any]] = {
    "lambda": lambda optimizer, _: schedules.LambdaLR(optimizer, lambda step: 0.8**step),
    "cosine": lambda optimizer, _: schedules.CosineAnnealingLR(optimizer, 2),
    "cyclic": lambda optimizer, names: schedules.CyclicLR(
        optimizer,
        [RATES[name] for name in names],
        [3 * RATES[name] if name == "weight" else 2 * RATES[name] for name in names],
        step_size_up=2,
        cycle_momentum=False,
    ),
    "one after the other": lambda optimizer, _: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, 1.0, 2), schedules.LambdaLR(optimizer, lambda step: 0.5**step)],
        milestones=[2],
    ),
}


def boosted(kind: str, names: list[str]) -> tuple[Booster, Any, Any, Any]:
    torch.manual_seed(0)
    booster, model = Booster(device="cpu"), nn.Linear(4, 2).double()
    groups = [{"params": [model.get_parameter(name)], "lr": RATES[name]} for name in names]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=SCHEDULES[kind](optimizer, names))
    return booster, model, optimizer, schedule


def train(booster: Booster, model: Any, optimizer: Any, schedule: Any, steps: int) -> list[torch.Tensor]:
    for _ in range(steps):
        booster.backward(model(torch.ones(3, 4, dtype=torch.float64)).square().mean(), optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_with_groups_in_another_order(kind: str, tmp_path: Path) -> None:
    run = boosted(kind, ["weight", "bias"])
    train(*run, steps=3)
    run[0].save(tmp_path, *run[1:])
    expected = train(*run, steps=3)
    other = boosted(kind, ["bias", "weight"])
    other[0].load(tmp_path, *other[1:])
    assert other[3].get_last_lr() == [group["lr"] for group in other[2].param_groups]
    for found, value in zip(train(*other, steps=3), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("refused", ["optimizer", "schedule", "loader"])
def test_where_one_part_is_refused_nothing_is_loaded(refused: str, tmp_path: Path) -> None:
    booster = Booster(device="cpu")

    def parts(**others: Any) -> list[Any]:
        torch.manual_seed(len(others))
        model = nn.Linear(4, 2)
        loader = booster.plugin.prepare_dataloader(
            TensorDataset(torch.arange(8)), 2, shuffle=True, seed=others.get("seed", 0)
        )
        optimizer = others.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.1)
        schedule = others.get("schedule", schedules.StepLR)(optimizer, 2)
        model, optimizer, _, loader, schedule = booster.boost(model, optimizer, None, loader, schedule)
        return [model, optimizer, schedule, loader]

    model, optimizer, schedule, loader = parts()
    next(iter(loader))
    booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
    optimizer.step()
    booster.save(tmp_path, model, optimizer, schedule, step=1, dataloader=loader)
    other = {"optimizer": torch.optim.SGD, "schedule": schedules.CosineAnnealingLR, "loader": 1}
    model, optimizer, schedule, loader = parts(**{{"loader": "seed"}.get(refused, refused): other[refused]})
    values, position = model.unwrap().weight.detach().clone(), loader.state_dict()
    with pytest.raises((CheckpointError, ConfigError)):
        booster.load(tmp_path, model, optimizer, schedule, dataloader=loader)
    assert torch.equal(model.unwrap().weight, values)
    assert loader.state_dict() == position
    assert not optimizer.state
    assert schedule.last_epoch == 0


PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="bf16"),
    "gemini": lambda: GeminiPlugin(precision="bf16", min_chunk_size_m=0.001, search_range_m=0.001),
    "hybrid": lambda: HybridParallelPlugin(1, 1, precision="bf16"),
}


def around_a_step(folder: str) -> None:
    for name, plugin in PLUGINS.items():
        booster, model = Booster(device="cpu", plugin=plugin()), nn.Linear(4, 2)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        # before the first step an optimizer has master weights and no moments
        booster.save(f"{folder}/{name}", model, optimizer, step=0)
        assert booster.load(f"{folder}/{name}", model, optimizer) == 0
        optimizer.backward(model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().sum())
        assert optimizer.has_accumulated_grads, name
        optimizer.step()
        assert not optimizer.has_accumulated_grads, name
        booster.save(f"{folder}/{name}", model, optimizer, step=1)
        assert booster.load(f"{folder}/{name}", model, optimizer) == 1


def test_a_run_resumes_from_before_and_after_its_first_step(tmp_path: Path) -> None:
    run_processes(around_a_step, 2, str(tmp_path))


def test_a_save_that_leaves_out_gradients_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    booster, model = Booster(device="cpu"), nn.Linear(4, 2)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, end in enumerate((optimizer.step, optimizer.zero_grad)):
        booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
        booster.save(tmp_path / "within", model, optimizer, step=step)
        assert f"Found some in booster.save of step {step}," in "".join(capfd.readouterr())
        end()
        booster.save(tmp_path / "between", model, optimizer, step=step)
        assert "gradients" not in "".join(capfd.readouterr())


def test_steps_are_integers(tmp_path: Path) -> None:
    booster, model = Booster(device="cpu"), nn.Linear(4, 2)
    for step in (2.5, "2", None, -1):
        with pytest.raises(ConfigError, match=rf"A step is an integer of at least 0, .* Found step={step}, keep=2"):
            booster.save(tmp_path, model, step=step)
    booster.save(tmp_path, model, step=np.int64(3))
    assert type(booster.load(tmp_path, model)) is int


def leave_parts_out(folder: str) -> None:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("colossal").addHandler(handler)
    booster, model = Booster(device="cpu", plugin=TorchDDPPlugin()), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = booster.plugin.prepare_dataloader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    schedule = schedules.LambdaLR(optimizer, lambda step: 0.8**step)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, None, loader, schedule)
    booster.save(folder, model, optimizer, schedule, dataloader=loader)
    for parts, left in (
        ({}, "lr_scheduler and dataloader"),
        ({"lr_scheduler": schedule}, "dataloader"),
        ({"dataloader": loader}, "lr_scheduler"),
    ):
        booster.load(folder, model, optimizer, **parts)
        assert f"Found a state of {left} in" in said.pop()
    booster.load(folder, model, optimizer, schedule, dataloader=loader)
    booster.load(folder, model)  # to measure it
    assert said == []


def test_a_part_that_is_saved_and_not_loaded_is_named(tmp_path: Path) -> None:
    run_processes(leave_parts_out, 1, str(tmp_path))
