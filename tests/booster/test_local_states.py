# pyright: reportArgumentType=false, reportCallIssue=false
"""What a rank has of a state is not written as if it were the state; in memory it can be used."""

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, inputs_of
from plugins import plugins
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.errors import CommunicationError, ConfigError, UnsupportedError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid with ZeRO-1", "tp2", "pp2")
FULL_MODELS = ("DDP", "ZeRO-1", "ZeRO-2", "Hybrid with ZeRO-1")
FULL_OPTIMIZERS = ("DDP",)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def step(booster: Booster, model: Any, optimizer: Any) -> None:
    booster.execute_pipeline(iter([inputs_of("llama")]), model, lambda out, _: out.loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def refused(content: Any, remedy: str, write: Callable[[Any], object] | None = None) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        (write or (lambda each: torch.save(each, io.BytesIO())))(content)


def check_states(plugins: list[str], folder: str) -> None:
    for plugin in plugins:
        booster, own = Booster(device="cpu", plugin=PLUGINS[plugin]()), build("llama").float()
        model, optimizer, *_ = booster.boost(own, adam(own))
        step(booster, model, optimizer)
        check_optimizer(plugin, booster, model, optimizer, folder)
        if plugin == "Gemini":  # whose own form is full, and that of a module around it would be neither
            with pytest.raises(UnsupportedError, match=r"state_dict\(only_rank_0="):
                nn.ModuleList([model]).state_dict()
            continue
        check_model(plugin, booster, model, optimizer)


def check_model(plugin: str, booster: Booster, model: Any, optimizer: Any) -> None:
    remedy = r"booster\.save_model\(model, checkpoint\)"
    if plugin in FULL_MODELS:
        assert torch.save(model.state_dict(), io.BytesIO()) is None
        return
    around = [nn.ModuleList([model])] if plugin == "tp2" else []  # as torch.compile puts one; DTensors know themselves
    for own in (model, *([] if plugin == "pp2" else [model.unwrap()]), *around):
        refused(own.state_dict(), remedy)
        refused({"model": own.state_dict(), "epoch": 3}, remedy)
        refused(copy.copy(own.state_dict()), remedy)
    # in memory it is what torch returns: kept, and loaded again
    best = copy.deepcopy(model.state_dict())
    if plugin == "tp2":
        refused({name: value.cpu().half() for name, value in model.state_dict().items()}, remedy)
        refused(
            {n: v for n, v in model.state_dict().items() if "q_proj" in n}, remedy, partial(save_file, filename="x")
        )
        whole = {name: value for name, value in model.state_dict().items() if "norm" in name}
        assert torch.save(whole, io.BytesIO()) is None
    before = [local(each).clone() for each in model.module.parameters()]
    step(booster, model, optimizer)
    assert not all(torch.equal(local(p), q) for p, q in zip(model.module.parameters(), before, strict=True))
    assert not any(model.load_state_dict(best))
    assert all(torch.equal(local(p), q) for p, q in zip(model.module.parameters(), before, strict=True))
    if plugin == "tp2":
        full = model.state_dict(only_rank_0=False)
        assert {name: value.shape for name, value in full.items()} == {
            name: value.shape for name, value in build("llama").state_dict().items()
        }
        assert torch.save(full, io.BytesIO()) is None


def check_optimizer(plugin: str, booster: Booster, model: Any, optimizer: Any, folder: str) -> None:
    if plugin in FULL_OPTIMIZERS:
        assert torch.save(optimizer.state_dict(), io.BytesIO()) is None
        return
    for content in (optimizer.state_dict(), {"optimizer": optimizer.state_dict()}, optimizer.state_dict()["state"]):
        refused(content, r"booster\.save_optimizer\(optimizer, checkpoint\) on all ranks")
    kept = copy.deepcopy(optimizer.state_dict())
    step(booster, model, optimizer)
    optimizer.load_state_dict(kept)
    now = optimizer.state_dict()["state"]
    assert now
    for number, entry in kept["state"].items():
        assert all(torch.equal(local(value), local(now[number][name])) for name, value in entry.items())
    if plugin == "pp2":
        return
    twin = build("llama").float()
    theirs = adam(twin)
    twin(**inputs_of("llama")).loss.backward()
    theirs.step()
    with pytest.raises(ConfigError, match=r"booster\.load_optimizer\(optimizer, file\) on all ranks"):
        optimizer.load_state_dict(theirs.state_dict())
    torch.save(theirs.state_dict(), f"{folder}/{plugin}{torch.distributed.get_rank()}.pt")
    booster.load_optimizer(optimizer, f"{folder}/{plugin}{torch.distributed.get_rank()}.pt")


def local(value: torch.Tensor) -> torch.Tensor:
    return getattr(value.detach(), "_local_tensor", value.detach())


@pytest.mark.parametrize(
    "plugins", [["DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini"], ["Hybrid with ZeRO-1", "tp2", "pp2"]]
)
def test_the_state_of_one_rank_is_not_saved_as_if_it_were_full(plugins: list[str], tmp_path: Path) -> None:
    run_processes(check_states, 2, plugins, str(tmp_path))


def gather_on_one_rank() -> str:
    net = nn.Linear(6, 2)
    model, *_ = Booster(device="cpu", plugin=PLUGINS["Gemini"]()).boost(net, torch.optim.SGD(net.parameters()))
    try:
        model.state_dict() if dist.get_rank() == 0 else dist.barrier()
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_state_that_one_rank_gathers_alone_says_who_has_to_call() -> None:
    first, _ = run_processes(gather_on_one_rank, 2)
    assert "by model.state_dict() or booster.save_model" in first
    assert "on all ranks, not on some of them" in first
    assert "rank 1 called barrier" in first
