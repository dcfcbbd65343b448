# pyright: reportArgumentType=false, reportCallIssue=false
"""A model of which a rank has shards or some layers, used as a full one: as in one process, or refused."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build
from float64 import KeepFloat64
from plugins import plugins
from small_models import batch_of, loss_of, net
from torch import distributed as dist
from torch import nn

from colossal._src.interface.partial_model import warn_of_partial_values
from colossal.booster import Booster
from colossal.errors import CheckpointError, ColossalError, UnsupportedError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "Gemini", "Gemini, tp2", "tp2", "pp2")
IN_PARTS = ("tp2", "pp2")


class Warnings(logging.Handler):
    """Keeps what is said of parameters that are those of one rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []
        logging.getLogger("colossal").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found += [record.getMessage()] * ("model.parameters()" in record.getMessage())


def boosted(plugin: str, model: Any = None) -> tuple[Booster, Any, Any]:
    booster, model = Booster(device="cpu", plugin=PLUGINS[plugin]()), model or net(plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return booster, model, optimizer


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ColossalError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------------- state dicts


def exchange_states(plugin: str) -> dict[str, Any]:
    """Load the state of the full model, and that of this rank into a full model."""
    full = {name: value + 1 for name, value in net(plugin).state_dict().items()}
    _, model, _ = boosted(plugin)
    own, state = model.unwrap(), model.state_dict
    found = {
        "full into unwrap": error_of(lambda: own.load_state_dict(full)),
        "full into wrapper": error_of(lambda: model.load_state_dict({f"module.{key}": full[key] for key in full})),
        "own names": error_of(lambda: model.load_state_dict(full)),
        "own names, not strict": error_of(lambda: model.load_state_dict(full, strict=False)),
    }
    if plugin in IN_PARTS:
        found["into full"] = error_of(lambda: net(plugin).load_state_dict(own.state_dict()))
        found["key"] = error_of(lambda: own.state_dict()["no name"])
        assert error_of(lambda: own.load_state_dict(own.state_dict())) == ""
        assert error_of(lambda: model.load_state_dict(state())) == ""
        assert error_of(lambda: copy.deepcopy(own).load_state_dict(own.state_dict())) == ""
    if plugin == "tp2":
        values = {key.removeprefix("module."): value for key, value in state().items()}
        found["values into full"] = error_of(lambda: net(plugin).load_state_dict(values))
        average = net(plugin).state_dict()["lm_head.weight"]
        found["average"] = error_of(lambda: average.lerp_(values["lm_head.weight"], 0.5))
        assert values["lm_head.weight"].shape == own.lm_head.weight.shape
    if plugin != "pp2":
        found["loaded"] = all(
            torch.equal(value, full[name]) for name, value in model.state_dict(only_rank_0=False).items()
        )
    return found


def exchange_all() -> dict[str, dict[str, Any]]:
    return {plugin: exchange_states(plugin) for plugin in PLUGINS}


def test_states_of_parts_and_of_full_models_are_not_mixed() -> None:
    first, second = run_processes(exchange_all, 2)
    for plugin in PLUGINS:
        for found in (first[plugin], second[plugin]):
            if plugin in IN_PARTS:
                for case in ("full into unwrap", "full into wrapper"):
                    assert found[case].startswith(CheckpointError.__name__), (plugin, case, found[case])
                    assert "booster.load_model(model, file) on all ranks" in found[case]
                assert found["into full"].startswith(UnsupportedError.__name__), plugin
                assert "model.state_dict(only_rank_0=False)" in found["into full"]
                assert "booster.save_model" in found["key"]
            if plugin.startswith("Gemini"):
                assert found["own names"] == found["own names, not strict"] == "", found
            else:
                for case in ("own names", "own names, not strict"):
                    assert "Call model.unwrap().load_state_dict(state)" in found[case], (plugin, case)
            if plugin == "tp2":
                for case in ("values into full", "average"):
                    assert "model.state_dict(only_rank_0=False)" in found[case], case
            assert plugin in IN_PARTS or found["loaded"], plugin


def load_other_values(is_sharded: bool) -> str:
    _, model, _ = boosted("FSDP")
    state = {name: value + dist.get_rank() for name, value in net("FSDP").state_dict().items()}
    if is_sharded:  # shards differ as they should
        state = model.unwrap().state_dict()
    return error_of(lambda: model.unwrap().load_state_dict(state))


def test_fsdp_rejects_a_state_that_differs_between_ranks() -> None:
    for message in run_processes(load_other_values, 2, False):
        assert "Read the same file on all ranks, or call booster.load_model(model, file)" in message
        assert "0.weight" in message
    assert run_processes(load_other_values, 2, True) == ["", ""]


# ---------------------------------------------------------------------- parameters, modules and attributes


def read(plugin: str) -> list[str]:
    """Count parameters, twice."""
    _, model, optimizer = boosted(plugin)
    optimizer.zero_grad()
    model.zero_grad()
    warnings = Warnings()
    warn_of_partial_values.cache_clear()
    for _ in range(2):
        sum(parameter.numel() for parameter in model.parameters())
        dict(model.named_parameters())
    return warnings.found


def test_parameters_of_one_rank_are_said_to_be_so_once() -> None:
    for plugin in ("tp2", "pp2"):
        (line,), none = run_processes(read, 2, plugin)
        assert "count parameters before boost" in line, plugin
        assert none == []
    assert run_processes(read, 2, "FSDP") == run_processes(read, 2, "DDP") == [[], []]


def change(plugin: str) -> dict[str, str]:
    own = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    _, layers, _ = boosted(plugin, own if plugin != "tp2" else None)
    _, model, _ = boosted("tp2" if plugin == "DDP" else plugin, build("llama").double())
    found = {
        "index": error_of(lambda: layers[0]),
        "unwrapped index": error_of(lambda: layers.unwrap()[0]),
        "loss": error_of(lambda: setattr(model, "loss_function", print)),
        "tie": error_of(lambda: model.tie_weights),
        "submodule": error_of(lambda: model.unwrap().model.norm),
        "head": error_of(lambda: model.unwrap().lm_head),
    }
    model.note = "of the program"
    assert model.note == "of the program"
    return found


def test_modules_and_attributes_of_the_own_model_are_reached_or_refused() -> None:
    for rank, found in enumerate(run_processes(change, 2, "pp2")):
        assert found["submodule"] == ""
        # the head is on the last stage alone
        assert found["head"] == "" if rank == 1 else "use lm_head of the model before it is boosted" in found["head"]
        assert found["index"].startswith("TypeError")
        assert "use modules of the model before it is boosted" in found["index"]
        assert "use modules of the model before it is boosted" in found["unwrapped index"]
        assert "use loss_function of the model before it is boosted" in found["loss"]
        assert "use tie_weights of the model before it is boosted" in found["tie"]
    for found in run_processes(change, 2, "DDP"):
        assert "use model.unwrap()[index]" in found["index"]
        assert found["unwrapped index"] == ""
        assert "use model.unwrap().loss_function" in found["loss"]
        assert "use model.unwrap().tie_weights" in found["tie"]


def train_tied(plugin: str) -> dict[str, torch.Tensor]:
    """Tie the weights again after boost, which ties them already."""
    with KeepFloat64():
        booster, model, optimizer = boosted(plugin, build("llama-tied").double())
        model.unwrap().tie_weights()
        for step in range(2):
            booster.execute_pipeline(iter([batch_of("tp2", step)]), model, lambda outputs, _: outputs.loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(only_rank_0=False)


@pytest.mark.parametrize("plugin", ["tp2", "ZeRO-1", pytest.param("DDP", marks=pytest.mark.slow)])
def test_weights_that_are_tied_again_stay_tied(plugin: str) -> None:
    with KeepFloat64():
        model = build("llama-tied").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            loss_of(model, batch_of("tp2", step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for state in run_processes(train_tied, 2, plugin):
        for name, value in model.state_dict().items():
            assert_equal(state[name], value, name)


# ---------------------------------------------------------------------- hooks of gradients in a pipeline

LIMIT = 1e-3


def clamp(parameter: Any) -> None:
    """What depends on how often it is called: on each micro-batch, as gradients accumulate."""
    parameter.grad.clamp_(-LIMIT, LIMIT)


def hook(weight: Any, kind: str) -> None:
    if kind == "gradient":
        weight.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
    else:
        weight.register_post_accumulate_grad_hook(clamp)


def pipeline_with_hook(kind: str, folder: str) -> None:
    with KeepFloat64():
        model = net("pp2")
        hook(model.model.layers[0].mlp.down_proj.weight, kind)
        booster, boosted_model, optimizer = boosted("pp2", model)
        run = partial(booster.execute_pipeline, model=boosted_model, optimizer=optimizer)
        run(iter([batch_of("pp2", 0)]), criterion=lambda outputs, _: outputs.loss)
        optimizer.step()
        booster.save_model(boosted_model, f"{folder}/{kind}.bin")


@pytest.mark.parametrize("kind", ["accumulated", pytest.param("gradient", marks=pytest.mark.slow)])
def test_hooks_in_a_pipeline_see_each_micro_batch_as_one_process_that_accumulates(kind: str, tmp_path: Any) -> None:
    run_processes(pipeline_with_hook, 2, kind, str(tmp_path))
    with KeepFloat64():
        model = net("pp2")
        hook(model.model.layers[0].mlp.down_proj.weight, kind)
        batch = batch_of("pp2", 0)
        for number in range(2):
            (loss_of(model, {key: value.chunk(2)[number] for key, value in batch.items()}) / 2).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    for name, value in torch.load(tmp_path / f"{kind}.bin").items():
        assert_equal(value, model.state_dict()[name], name)


# ---------------------------------------------------------------------- calls of which ranks make different numbers


def boost_after_the_loop() -> str:
    """Rank 1 has no batch, and goes on with another model."""
    booster, model, optimizer = boosted("tp2")

    def run() -> None:
        if dist.get_rank() == 0:
            booster.backward(loss_of(model, batch_of("tp2", 0)), optimizer)
        boosted("tp2")

    return error_of(run)


def test_a_rank_that_leaves_the_loop_early_is_named() -> None:
    first, second = run_processes(boost_after_the_loop, 2)
    assert "rank 0 compares its batches, while another one compares what it boosts" in first
    assert "rank 1 compares what it boosts, while another one compares its batches" in second
    assert all("the same number of batches on all ranks" in message for message in (first, second))


def boost_synchronized_norm() -> list[str]:
    model = nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6)).double()
    return [error_of(partial(boosted, plugin, model)) for plugin in ("DDP", "ZeRO-1")]


def test_synchronized_norms_are_refused_on_the_cpu_at_boost() -> None:
    for messages in run_processes(boost_synchronized_norm, 2):
        assert all("Leave out convert_sync_batchnorm there" in message for message in messages)
