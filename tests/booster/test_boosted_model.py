# pyright: reportArgumentType=false, reportCallIssue=false
"""What users do with the boosted model works as with a plain one, or says what to do instead."""

import copy
import gc
import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from plugins import plugins
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.testing import run_threads

PLUGINS = plugins("none", "DDP", "ZeRO-1", "ZeRO-2", "FSDP", "Gemini", "tp2", "pp2")
FULL = ("none", "DDP")
SHARDED = ("ZeRO-1", "ZeRO-2", "Gemini", "tp2", "pp2")


def boosted(plugin: str, model: Any = None) -> tuple[Booster, Any, Any, Any]:
    own = model or build("llama").float()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    return booster, own, model, optimizer


# ---------------------------------------------------------------------- moves and casts


def move_and_train(plugin: str) -> list[Any]:
    booster, _, model, optimizer = boosted(plugin)
    if plugin == "Gemini":
        with pytest.raises(UnsupportedError, match="Do it before boost"):
            model.to("cpu")
    else:
        assert model.to("cpu") is model.float() is model
    if plugin == "FSDP":
        with pytest.raises(UnsupportedError, match=r"by to\(\) or half\(\). Do it before boost"):
            model.half()
    tokens = torch.arange(8).view(1, 8)
    booster.backward(model(tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    return [value.sum().item() for value in model.state_dict(only_rank_0=False).values()]


@pytest.mark.parametrize("plugin", ["ZeRO-2", "FSDP", "tp2", "Gemini"])
def test_a_move_to_where_a_model_is_changes_nothing(plugin: str) -> None:
    (expected,) = run_threads(move_and_train, 1, "none")
    for found in run_threads(move_and_train, 2, plugin):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ---------------------------------------------------------------------- what torch.compile makes of a boosted model


def compile_boosted(plugin: str, folder: str) -> list[bool]:
    booster, own, model, optimizer = boosted(plugin)
    compiled: Any = torch.compile(model, backend="eager")
    booster.save_model(compiled, folder, shard=True, use_safetensors=True)
    with booster.no_sync(compiled), compiled.no_sync():
        before = {name: value.clone() for name, value in own.state_dict().items()}
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    booster.load_model(compiled, folder)
    with pytest.raises(ConfigError, match="boosted already"):
        booster.boost(compiled)
    booster.save(f"{folder}/run", compiled, optimizer, step=1)
    assert booster.load(f"{folder}/run", compiled, optimizer) == 1
    return [torch.equal(value, before[name]) for name, value in own.state_dict().items()]


@pytest.mark.parametrize("plugin", ["none", "DDP", "ZeRO-1", "tp2", "pp2"])
def test_checkpoints_see_through_a_compiled_boosted_model(plugin: str, tmp_path: Path) -> None:
    for equal in run_threads(compile_boosted, 1 if plugin == "none" else 2, plugin, str(tmp_path)):
        assert equal
        assert all(equal)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    found = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert found == set(build("llama").state_dict())


# ---------------------------------------------------------------------- where its inputs go


def place_of(plugin: str, own: nn.Module) -> list[Any]:
    found: list[Any] = []
    for each in (None, None if plugin == "tp2" else copy.deepcopy(own)):  # tp takes known families
        _, _, model, _ = boosted(plugin, each)
        found += [model.device.type, model.dtype is next(model.unwrap().parameters()).dtype, hasattr(model, "no_name")]
    return found


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_boosted_model_has_a_device_and_a_type(plugin: str) -> None:
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for found in run_threads(place_of, 1 if plugin == "none" else 2, plugin, own):
        assert found == ["cpu", True, False] * 2


# ---------------------------------------------------------------------- clipping of the own model


def clip_own(plugin: str) -> list[str]:
    _, own, model, _ = boosted(plugin)
    found = []
    for each in (own, model.unwrap()):
        assert len(list(each.parameters())) == len(dict(each.named_parameters())) > 0  # others may ask
        if plugin in FULL:
            for parameter in each.parameters():
                parameter.grad = torch.ones_like(parameter)
        for clip in (clip_grad_norm_, clip_grad_value_):
            for parameters in (each.parameters(), (p for p in each.parameters() if p.requires_grad)):
                try:
                    clip(parameters, 0.1)
                    found.append("")
                except ConfigError as error:
                    found.append(str(error))
    return found


@pytest.mark.parametrize("plugin", SHARDED)
def test_torch_does_not_clip_the_own_model_if_its_gradients_are_sharded(plugin: str) -> None:
    for messages in run_threads(clip_own, 2, plugin):
        assert len(messages) == 8
        assert all("Call optimizer.clip_grad_by_norm(max_norm)" in message for message in messages)


@pytest.mark.parametrize("plugin", FULL)
def test_torch_clips_the_own_model_if_its_gradients_are_there(plugin: str) -> None:
    assert run_threads(clip_own, 1 if plugin == "none" else 2, plugin) == [[""] * 8] * (1 if plugin == "none" else 2)


def copies() -> bool:
    own = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    Booster(device="cpu", plugin=PLUGINS["ZeRO-1"]()).boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="clipped by the boosted optimizer"):
        clip_grad_norm_(own.parameters(), 0.1)
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    for again in (copy.deepcopy(own), torch.load(file, weights_only=False)):
        assert {id(p) for p in again.parameters()}.isdisjoint(id(p) for p in own.parameters())
        assert [p.shape for p in again.parameters()] == [p.shape for p in own.parameters()]
        clip_grad_norm_(again.parameters(), 0.1)
    Booster(device="cpu", plugin=TorchDDPPlugin()).boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    clip_grad_norm_(own.parameters(), 0.1)
    return True


def test_copies_and_models_that_are_boosted_again_may_be_clipped() -> None:
    assert run_threads(copies, 2) == [True, True]


def test_the_check_does_not_keep_a_model_alive() -> None:
    from colossal._src.interface.guarded_params import guard_parameters

    model = nn.Linear(2, 2)
    guard_parameters(model.parameters(), None, has_full_grads=False)
    gc.disable()
    try:
        ref = weakref.ref(model)
        del model
        assert ref() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- no_sync of the model


def sync_twice(plugin: str) -> list[torch.Tensor]:
    """Accumulate two backward passes, as with PyTorch's DDP, and step."""
    own = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.eye_(own[0].weight)
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    rank, size = booster.plugin.data_parallel_rank_and_size()
    inputs = torch.arange(16.0).reshape(2, 2, 4)  # of two passes, a row for each of two ranks
    for number, part in enumerate(inputs):
        local = part.chunk(size)[rank]
        if number == 0:
            with model.no_sync():
                booster.backward(model(local).square().mean(), optimizer)
        else:
            booster.backward(model(local).square().mean(), optimizer)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"Call booster\.no_sync\(model\)"):
        copy.copy(model).no_sync()
    return list(model.state_dict(only_rank_0=False).values())


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-1", "ZeRO-2", "Gemini"])
def test_gradients_accumulate_under_no_sync_of_the_model(plugin: str) -> None:
    (expected,) = run_threads(sync_twice, 1, "none")[0]
    for (found,) in run_threads(sync_twice, 2, plugin):
        torch.testing.assert_close(found, expected)
