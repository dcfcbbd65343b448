# pyright: reportArgumentType=false
"""The plugin hands options of `ShardFormer` on to each stage: equal to one process, with fewer bytes, or an error."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from equality import RTOL
from families import build, inputs_of
from float64 import KeepFloat64
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.lazy import LazyInitContext
from colossal.shardformer import GradientCheckpointConfig, PipelineGradientCheckpointConfig, plan_of
from colossal.testing import fake_world, run_processes

pytestmark = pytest.mark.slow

STEPS, FAMILIES = 3, ("llama", "gpt2", "bloom")
PIPE = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}
V: dict[str, Any] = PIPE | {"pp_style": "zbv", "num_model_chunks": 2}
WORLDS: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "tp2": (2, {"tp_size": 2, "pp_size": 1}, [3]),
    "pp2": (2, PIPE, [2, 1]),
    "pp2-v": (2, V, [1, 1, 0, 1]),
    "tp2-pp2": (4, PIPE | {"tp_size": 2}, [2, 0]),
}


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def layers_of(model: Any) -> list[nn.Module]:
    """The layers that a rank has."""
    names = ("LlamaDecoderLayer", "GPT2Block", "BloomBlock")
    return [module for module in model.modules() if type(module).__name__ in names]


def train(world: str) -> dict[str, Any]:
    with KeepFloat64():
        return {name: train_one(name, world, is_lazy=name == "gpt2") for name in FAMILIES}


def train_one(name: str, world: str, is_lazy: bool) -> dict[str, Any]:
    _, options, numbers = WORLDS[world]
    plugin = HybridParallelPlugin(
        precision="fp32",
        max_norm=0.05,
        enable_flash_attention=name != "bloom",
        enable_fused_normalization=True,
        gradient_checkpoint_config=PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=numbers),
        **options,
    )
    booster = Booster(plugin=plugin)
    if is_lazy:
        with LazyInitContext():
            model: nn.Module = build(name, "eager", num_layers=4)
    else:
        model = build(name, "eager", num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    runs = [0] * len(layers_of(model))
    for index, layer in enumerate(layers_of(model)):
        norm = next(module for module in layer.modules() if "Norm" in type(module).__name__)
        norm.register_forward_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    losses, norms = [], []
    for step in range(STEPS):
        batch = inputs_of(name, num_changed=step)
        if plugin.pp_size > 1:
            loss = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)["loss"]
        else:
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
        norms.append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "runs": runs}


def alone(name: str, num_parts: int) -> dict[str, Any]:
    model = build(name, "eager", num_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        batch, total = inputs_of(name, num_changed=step), 0.0
        for index in range(num_parts):
            with KeepFloat64():
                loss = model(**{key: value.chunk(num_parts)[index] for key, value in batch.items()}).loss / num_parts
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"losses": losses, "norms": norms}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    size, *_ = WORLDS[request.param]
    return request.param, run_processes(train, size, request.param)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_one_process(name, world) -> None:
    label, ranks = world
    size, options, numbers = WORLDS[label]
    parts = 2 if options["pp_size"] == 2 else 1
    expected = alone(name, parts)
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(expected["losses"], rel=RTOL)
        assert rank[name]["norms"] == pytest.approx(expected["norms"], rel=RTOL)
    counted = sum(sum(rank[name]["runs"]) for rank in ranks) // options["tp_size"]
    assert counted == STEPS * parts * (4 + sum(numbers)), "a layer that is checkpointed runs twice"
    assert size == options["tp_size"] * options["pp_size"]


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": PIPE,
    "interleaved": PIPE | {"pp_style": "interleaved", "num_model_chunks": 2},
    "zbv": V,
}


def switch_on_and_off() -> dict[str, dict[str, Any]]:
    with KeepFloat64():
        return {name: switched(options) for name, options in SCHEDULES.items()}


def switched(options: dict[str, Any]) -> dict[str, Any]:
    """Make a step as it is, one with the switch on, and one with the switch off again."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", max_norm=0.05, **options))
    model = build("llama", "eager", num_layers=4)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    inner: Any = boosted.unwrap()
    runs, counted = [0], []
    for layer in layers_of(inner):
        layer.get_submodule("input_layernorm").register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    losses, norms = [], []
    for step in range(STEPS):
        if step == 1:
            inner.activation_checkpointing_enable({"use_reentrant": False})
        if step == 2:
            inner.activation_checkpointing_disable()
        done = booster.execute_pipeline(iter([inputs_of("llama", num_changed=step)]), boosted, loss_of, optimizer)
        losses.append(float(done["loss"]))
        norms.append(optimizer.get_grad_norm())
        counted.append(runs[0])
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "runs": counted}


def test_the_switch_of_a_pipelined_model() -> None:
    expected = alone("llama", 2)
    ranks = run_processes(switch_on_and_off, 2)
    for style in SCHEDULES:
        for rank in (each[style] for each in ranks):
            assert rank["losses"] == pytest.approx(expected["losses"], rel=RTOL)
            assert rank["norms"] == pytest.approx(expected["norms"], rel=RTOL)
        assert [sum(rank[style]["runs"][step] for rank in ranks) for step in range(STEPS)] == [8, 24, 32]


def test_what_the_switch_does_not_do() -> None:
    with fake_world(2):
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **PIPE))
        inner: Any = booster.boost(build("llama"))[0].unwrap()
        with pytest.raises(UnsupportedError, match=r"Found \{'use_reentrant': True\}.*gradient_checkpoint_config="):
            inner.gradient_checkpointing_enable({"use_reentrant": True})
        inner = booster.boost(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0].unwrap()
        with pytest.raises(UnsupportedError, match=r"Found Sequential, which.*gradient_checkpoint_config="):
            inner.gradient_checkpointing_enable()


def compiled_in_a_v() -> list[float]:
    plugin = HybridParallelPlugin(precision="fp32", enable_jit_fused=True, **V)
    booster = Booster(plugin=plugin)
    model: nn.Module = build("gpt2", num_layers=4)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(STEPS):
        batch = inputs_of("gpt2", num_changed=step)
        losses.append(float(booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_compiled_activations_while_weight_gradients_wait() -> None:
    for losses in run_processes(compiled_in_a_v, 2, fresh=True):
        assert losses == pytest.approx(alone("gpt2", 2)["losses"], rel=1e-3)  # not clipped here


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("bloom", {"enable_flash_attention": True}, UnsupportedError, "BloomForCausalLM, which has 'eager' only"),
        (
            "gpt2",
            {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 2])},
            ConfigError,
            r"Found \[1, 2\], where stage 1 has 1 layers",
        ),
        (
            "gpt2",
            {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1])},
            ConfigError,
            "a number for each of 2 stages",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(name, options, kind, message) -> None:
    for rank in range(2):
        with fake_world(2, rank=rank):
            booster = Booster(device="cpu", plugin=HybridParallelPlugin(precision="fp32", **PIPE, **options))
            with pytest.raises(kind, match=message):
                booster.boost(build(name))


def test_families_without_stages() -> None:
    model, config = build("t5"), GradientCheckpointConfig(1.0)
    plan = replace(plan_of(model), stages=None)
    with fake_world(2):
        plugin = HybridParallelPlugin(2, 1, precision="fp32", custom_policy=plan, gradient_checkpoint_config=config)
        with pytest.raises(UnsupportedError, match="whose plan has no stages"):
            Booster(device="cpu", plugin=plugin).boost(model)
