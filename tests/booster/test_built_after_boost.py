# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
"""Schedules and hooks of torch that are built of the boosted optimizer do what they do to a plain one."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from float64 import KeepFloat64
from plugins import plugins
from small_models import BATCHES, DIVIDING, batch_of, loss_of, net
from torch import distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR
from transformers import get_cosine_schedule_with_warmup

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1", *DIVIDING)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 4),
    "one cycle, which moves the momentum": lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=6),
    "one lambda a group": lambda optimizer: schedules.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1 / (n + 1)]),
    "of several": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.ExponentialLR(optimizer, 0.5)], [2]
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.01, anneal_epochs=3),
    "transformers": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 1, 4),
    "own": lambda optimizer: CosineAnnealingWarmupLR(optimizer, total_steps=5, warmup_steps=2),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    return torch.optim.SGD([{"params": matrices}, {"params": vectors, "lr": 0.2}], lr=0.1, momentum=0.9)


def boosted(plugin: str, **options: Any) -> tuple[Booster, Any, Any]:
    model = net(plugin)
    booster = Booster(device="cpu", plugin=PLUGINS[plugin](), **options)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    return booster, model, optimizer


def train(booster: Any, plugin: str, model: Any, optimizer: Any, schedule: Any, steps: Any) -> None:
    for step in steps:
        batch = batch_of(plugin, step)
        if booster is None:
            loss_of(model, batch).backward()
        elif plugin in DIVIDING:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        else:
            for half in batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(2):  # accumulated
                booster.backward(loss_of(model, half) / 2, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def values_of(booster: Booster, model: Any, folder: str) -> dict[str, torch.Tensor]:
    """The full parameters, which a pipeline gives to files only."""
    booster.save_model(model, folder, shard=True, use_safetensors=False)
    dist.barrier()
    state: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.bin")):
        state |= torch.load(file)
    return state


def continue_with(plugin: str, kind: str, folder: str) -> dict[str, torch.Tensor]:
    """Train two steps, save all, and train two more with new objects."""
    booster, model, optimizer = boosted(plugin)
    schedule = SCHEDULES[kind](optimizer)
    train(booster, plugin, model, optimizer, schedule, range(2))
    booster.save_model(model, f"{folder}/model", shard=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    booster.save_lr_scheduler(schedule, f"{folder}/schedule")
    booster, model, optimizer = boosted(plugin)
    schedule = SCHEDULES[kind](optimizer)
    booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    booster.load_lr_scheduler(schedule, f"{folder}/schedule")
    train(booster, plugin, model, optimizer, schedule, range(2, 4))
    return values_of(booster, model, f"{folder}/end")


def run_all(kinds: list[tuple[str, str]], folder: str) -> Any:
    with KeepFloat64():
        return {each: continue_with(*each, f"{folder}/{'-'.join(each)}") for each in kinds}


def compare(kinds: list[tuple[str, str]], folder: Path) -> None:
    rank, *_ = run_processes(run_all, 2, kinds, str(folder))
    for plugin, kind in kinds:
        model = net(plugin)
        optimizer = sgd(model)
        with KeepFloat64():
            train(None, plugin, model, optimizer, SCHEDULES[kind](optimizer), range(4))
        for name, value in model.state_dict().items():
            if name in rank[plugin, kind]:  # a tied one may be in files once
                assert_equal(rank[plugin, kind][name], value, f"{plugin}, {kind}, {name}")
        assert "lm_head.weight" in rank[plugin, kind] or plugin not in DIVIDING


@pytest.mark.slow
def test_schedules_of_the_boosted_optimizer_train_and_resume_as_in_one_process(tmp_path: Path) -> None:
    compare(
        [("DDP", "own"), ("ZeRO-2", "one cycle, which moves the momentum"), ("pp2", "one lambda a group")], tmp_path
    )


@pytest.mark.slow
def test_every_schedule_under_every_plugin(tmp_path: Path) -> None:
    compare([(plugin, kind) for plugin in PLUGINS for kind in SCHEDULES], tmp_path)


def skip_and_hook(_: None) -> Any:
    """Overflow in the second of three steps, on one rank; read the model in a hook after each step."""
    found: dict[str, Any] = {}
    for plugin, make in {
        "ZeRO-1": partial(LowLevelZeroPlugin, precision="fp16", initial_scale=4.0),
        "Gemini": partial(GeminiPlugin, precision="fp16", initial_scale=4.0),
        "Hybrid": partial(HybridParallelPlugin, 1, 1, precision="fp16", initial_scale=4.0),
    }.items():
        booster, model = Booster(device="cpu", plugin=make()), net(plugin).float()
        boosted_model, optimizer, *_ = booster.boost(model, sgd(model))
        schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        values, before = [boosted_model.state_dict(only_rank_0=False)["0.bias"]], []
        optimizer.register_step_pre_hook(lambda *_, seen=before: seen.append(1))
        handle = optimizer.register_step_post_hook(
            lambda _optimizer, _args, _kwargs, seen=values, of=boosted_model: seen.append(
                of.state_dict(only_rank_0=False)["0.bias"]
            )
        )
        for step in range(3):
            x = BATCHES[step].chunk(2)[dist.get_rank()].half()
            x = x * torch.inf if step == 1 and dist.get_rank() else x
            booster.backward(boosted_model(x).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(1.0)
        handle.remove()
        moved = [not torch.equal(new, old) for old, new in pairwise(values)]
        found[plugin] = (moved, len(before), optimizer.param_groups[0]["lr"], optimizer.unwrap().param_groups[0]["lr"])
    return found


def test_hooks_run_after_steps_that_are_not_skipped_and_see_the_new_values() -> None:
    for rank in run_processes(skip_and_hook, 2, None):
        assert rank == {plugin: ([True, True], 2, 0.025, 0.025) for plugin in ("ZeRO-1", "Gemini", "Hybrid")}


def use_grad_scaler(_: None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for plugin in ("DDP", "FSDP", "Hybrid", "ZeRO-1", "ZeRO-2", "Gemini", "tp2"):
        _, model, optimizer = boosted(plugin)
        before = copy.deepcopy(optimizer.state_dict()["param_groups"])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        rank_loss = loss_of(model, batch_of(plugin, 0))
        optimizer.backward(scaler.scale(rank_loss * (torch.inf if dist.get_rank() else 1)))
        try:
            scaler.step(optimizer)
            scaler.update()
            found[plugin] = scaler.get_scale()
        except ConfigError as error:
            found[plugin] = str(error)
        with pytest.raises(UnsupportedError, match=r"booster\.save_optimizer"):
            copy.deepcopy(optimizer)
        with pytest.raises(UnsupportedError, match=r"booster\.save_optimizer"):
            pickle.dumps(optimizer)
        assert optimizer.state_dict()["param_groups"] == before
        assert "lr: 0.2" in repr(optimizer)
    return found


def test_a_grad_scaler_of_torch_sees_overflows_or_is_refused_and_copies_are_refused() -> None:
    for rank in run_processes(use_grad_scaler, 2, None):
        for plugin, found in rank.items():
            if plugin in ("DDP", "FSDP", "Hybrid"):
                assert found == 2.0, plugin
            else:
                assert "mixed_precision='fp16'" in found, plugin
