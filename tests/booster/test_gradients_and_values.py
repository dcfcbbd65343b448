# pyright: reportArgumentType=false, reportCallIssue=false
"""Gradients and values of a boosted model mean what they mean in PyTorch, or the optimizer's verbs are named."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build
from plugins import HYBRID, plugins
from torch import distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, vector_to_parameters

from colossal._src.interface import ClippedByOptimizer, WorkingParameter
from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossal.errors import ConfigError, UnsupportedError
from colossal.testing import run_processes, run_threads

FULL = plugins("DDP", "FSDP", "Hybrid")
"""Gradients are in the parameters: all of them, or as DTensors, on which torch's functions are right."""
SHARDED = plugins("ZeRO-1", "Gemini") | {
    "ZeRO-2": partial(LowLevelZeroPlugin, stage=2, precision="fp32", reduce_bucket_size_in_m=0.0001),
    "Hybrid, ZeRO-1": partial(HYBRID, 1, 1, zero_stage=1),
}
HALF: dict[str, Callable[[], Plugin]] = {
    "DDP, fp16_naive": TorchDDPPlugin,
    "ZeRO-1, bf16": partial(LowLevelZeroPlugin, precision="bf16"),
    "ZeRO-2, fp16": partial(LowLevelZeroPlugin, stage=2, precision="fp16"),
    "Hybrid, bf16": partial(HybridParallelPlugin, 1, 1, precision="bf16"),
    "Hybrid, ZeRO-1, bf16": partial(HybridParallelPlugin, 1, 1, precision="bf16", zero_stage=1),
}
"""The optimizer updates float32 master weights."""
GEMINI_HALF = {"Gemini, bf16": partial(GeminiPlugin, precision="bf16")}
PARTS = plugins("tp2", "Gemini, tp2")
"""A rank has some of the layers, or a shard of each: of a model of transformers."""
EXACT = FULL | SHARDED
THREADS = EXACT | HALF | GEMINI_HALF | PARTS
PIPELINE = plugins("pp2") | {
    "pp2, bf16": partial(HybridParallelPlugin, 1, 2, num_microbatches=2, precision="bf16"),
}
"""Stages send messages, which ranks that are threads cannot."""
PLUGINS = THREADS | PIPELINE
BATCHES = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
IDS = (torch.arange(48) * 7 % 31).view(2, 4, 6)


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():  # ranks that are threads draw from one generator
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.6, 0.5, parameter.numel()).view_as(parameter).roll(number, 0))
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def boosted(plugin: str, make: Callable[[Any], torch.optim.Optimizer] = sgd, **options: Any) -> tuple[Any, Any, Any]:
    model = build("llama").float() if plugin in PARTS | PIPELINE else net()
    model = model if plugin in EXACT else model.float()
    precision = {"mixed_precision": "fp16_naive"} if plugin == "DDP, fp16_naive" else {}
    booster = Booster(device="cpu", plugin=PLUGINS[plugin](), **precision, **options)
    model, optimizer, *_ = booster.boost(model, make(model.parameters()))
    return booster, model, optimizer


def share(step: int) -> torch.Tensor:
    return BATCHES[step].chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else BATCHES[step]


def backward(plugin: str, booster: Any, model: Any, optimizer: Any, step: int = 0) -> Any:
    if plugin in PARTS | PIPELINE:
        batch = {"input_ids": IDS[step % 2], "labels": IDS[step % 2]}
        criterion = lambda outputs, _batch: outputs.loss  # noqa: E731
        return booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
    x = share(step) if plugin in EXACT else share(step).float()
    loss = model(x).square().mean()
    booster.backward(loss, optimizer)
    return loss


def values(model: Any) -> dict[str, torch.Tensor]:
    if hasattr(model.module, "stages"):
        return {name: value.clone() for name, value in model.state_dict().items()}
    return {name: value.detach().clone() for name, value in model.state_dict(only_rank_0=False).items()}


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def one_process(train: Callable[[nn.Module, torch.optim.Optimizer], None]) -> dict[str, torch.Tensor]:
    model = net()
    train(model, sgd(model.parameters()))
    return model.state_dict()


# ---------------------------------------------------------------------------------------------- zero_grad


def zeroed(plugin: str, set_to_none: bool, by_model: bool) -> Any:
    booster, model, optimizer = boosted(plugin)
    for step in range(3):
        (model if by_model else optimizer).zero_grad(set_to_none=set_to_none)
        backward(plugin, booster, model, optimizer, step)
        optimizer.step()
    return values(model)


def zero_both_ways(plugin: str) -> Any:
    runs = {(none, way): zeroed(plugin, none, way) for none in (True, False) for way in (True, False)}
    for none in (True, False):
        assert_same(runs[none, True], runs[none, False])
    return runs[True, True]


@pytest.mark.parametrize("plugin", THREADS)
def test_zero_grad_of_the_model_is_that_of_the_optimizer(plugin: str) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            model.zero_grad()
            model(BATCHES[step]).square().mean().backward()
            optimizer.step()

    for found in run_threads(zero_both_ways, 2, plugin):
        for name, value in one_process(train).items() if plugin in EXACT else ():
            assert_equal(found[name], value, name)


def zero_what_is_not_reduced(plugin: str) -> Any:
    booster, model, optimizer = boosted(plugin)
    with booster.no_sync(model):
        backward(plugin, booster, model, optimizer, 0)
    model.zero_grad()
    backward(plugin, booster, model, optimizer, 1)
    optimizer.step()
    return values(model)


@pytest.mark.parametrize("plugin", EXACT)
def test_zero_grad_of_the_model_discards_what_no_sync_accumulated(plugin: str) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(BATCHES[1]).square().mean().backward()
        optimizer.step()

    for found in run_threads(zero_what_is_not_reduced, 2, plugin):
        for name, value in one_process(train).items():
            assert_equal(found[name], value, name)


def zero_own(plugin: str) -> str:
    booster, model, optimizer = boosted(plugin)
    own = model.unwrap()
    own.zero_grad()
    backward(plugin, booster, model, optimizer)
    before = optimizer.get_grad_norm()
    assert before > 0
    try:
        own.zero_grad()
    except ConfigError as error:
        assert optimizer.get_grad_norm() == before
        return str(error)
    assert optimizer.get_grad_norm() == 0
    return ""


@pytest.mark.parametrize("plugin", EXACT | HALF | GEMINI_HALF)
def test_zero_grad_of_the_own_model_discards_the_gradients_or_says_how(plugin: str) -> None:
    for message in run_threads(zero_own, 2, plugin):
        assert bool(message) == (plugin not in FULL)
        assert not message or "Discard gradients by zero_grad() of the boosted model or optimizer" in message


def test_zero_grad_after_zero_model_wrapper_discards_the_gradients_or_says_how() -> None:
    from colossal.zero import zero_model_wrapper, zero_optim_wrapper

    def program(stage: int) -> None:
        model: Any = zero_model_wrapper(
            net(), zero_stage=stage, **({"gemini_config": {"mixed_precision": None}} if stage > 2 else {})
        )
        optimizer = zero_optim_wrapper(model, sgd(model.parameters()))
        optimizer.backward(model(share(0)).square().mean())
        if stage > 2:
            model.zero_grad()
            assert optimizer.get_grad_norm() == 0
        else:
            with pytest.raises(ConfigError, match="Discard gradients by zero_grad"):
                model.zero_grad()

    for stage in (1, 3):
        run_threads(program, 2, stage)


# ---------------------------------------------------------------------------------------------- parameter.grad


def read_grads(plugin: str) -> list[str]:
    booster, model, optimizer = boosted(plugin)
    parameter = next(iter(model.unwrap().parameters()))
    assert parameter.grad is None
    backward(plugin, booster, model, optimizer)
    if "Gemini" not in plugin:
        model.to("cpu")  # torch looks at gradients there
    optimizer.unscale_grad()
    found = []
    for use in (
        lambda: parameter.grad,
        lambda: setattr(parameter, "grad", None),
        lambda: setattr(parameter, "grad", torch.zeros(parameter.shape, dtype=parameter.dtype)),
    ):
        with pytest.raises(ConfigError) as raised:
            use()
        found.append(str(raised.value))
    assert sum(each.grad is not None for each in optimizer.parameters)
    optimizer.step()
    optimizer.zero_grad()
    assert parameter.grad is None
    parameter.grad = None
    return found


@pytest.mark.parametrize("plugin", SHARDED | HALF | GEMINI_HALF)
def test_a_gradient_that_the_optimizer_holds_is_not_none(plugin: str) -> None:
    for read, *writes in run_threads(read_grads, 2, plugin):
        assert "Found a read of .grad of a parameter of the model, of shape (8, 6)" in read
        assert "optimizer.parameters after optimizer.unscale_grad()" in read
        assert all("Found a write of .grad" in each for each in writes)


def test_a_guarded_parameter_is_like_any_other() -> None:
    def program() -> None:
        _, model, _ = boosted("ZeRO-1, bf16")
        own, plain = model.unwrap(), net().bfloat16()
        for parameter, other in zip(own.parameters(), plain.parameters(), strict=True):
            assert isinstance(parameter, nn.Parameter)
            assert repr(parameter) == repr(other)
            assert type(parameter * 2) is type(parameter.detach()) is type(parameter.data) is torch.Tensor
        assert all(type(each) is nn.Parameter for each in copy.deepcopy(own).parameters())

    run_threads(program, 2)


# ---------------------------------------------------------------------------------------------- torch's clipping


def clipped_by_torch(plugin: str) -> list[str]:
    booster, model, optimizer = boosted(plugin)
    own = model.module if plugin in PIPELINE else model.unwrap()
    made_before = [
        list(model.parameters()),
        list(own.parameters()),
        next(iter(own.children())).parameters(),
        optimizer.parameters,
        [each for group in optimizer.param_groups for each in group["params"]],
        [each for group in optimizer.unwrap().param_groups for each in group["params"]],
    ]
    backward(plugin, booster, model, optimizer)
    found = []
    for number, parameters in enumerate(made_before):
        try:
            (clip_grad_norm_, clip_grad_value_)[number % 2](parameters, 1e-3)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    optimizer.step()
    optimizer.zero_grad()
    backward(plugin, booster, model, optimizer)
    with pytest.raises(ConfigError) if found[3] else nullcontext():
        clip_grad_norm_(made_before[3], 0.1)  # as guarded after a step as before
    return found


@pytest.mark.parametrize("plugin", SHARDED | HALF | GEMINI_HALF | PARTS)
def test_torch_clips_no_list_of_parameters_whose_gradients_are_elsewhere(plugin: str) -> None:
    for messages in run_threads(clipped_by_torch, 2, plugin):
        assert len(messages) == 6
        assert all("Call optimizer.clip_grad_by_norm(max_norm)" in message for message in messages)


@pytest.mark.parametrize("plugin", FULL)
def test_torch_clips_lists_of_parameters_whose_gradients_are_there(plugin: str) -> None:
    assert run_threads(clipped_by_torch, 2, plugin) == [[""] * 6] * 2


# ---------------------------------------------------------------------------------------------- closures


def stepped(plugin: str, by_closure: bool, make: Callable[[Any], Any] = sgd) -> Any:
    booster, model, optimizer = boosted(plugin, make, max_norm=0.1)
    for step in range(2):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            with booster.no_sync(model) if plugin not in PARTS | PIPELINE else nullcontext():
                backward(plugin, booster, model, optimizer, 2 * step)
            return backward(plugin, booster, model, optimizer, 2 * step + 1)

        if by_closure:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()
    return values(model)


def step_both_ways(plugin: str) -> Any:
    found, expected = stepped(plugin, True), stepped(plugin, False)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=name)
    return found


def train_clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        for batch in BATCHES[2 * step : 2 * step + 2]:
            model(batch).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("plugin", [each for each in THREADS if "fp16" not in each])
def test_gradients_of_a_closure_are_accumulated_averaged_and_clipped(plugin: str) -> None:
    for found in run_threads(step_both_ways, 2, plugin):
        for name, value in one_process(train_clipped).items() if plugin in EXACT else ():
            assert_equal(found[name], value, name)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)


def test_an_optimizer_that_asks_several_times_gets_clipped_gradients_each_time() -> None:
    model = net()
    optimizer = lbfgs(model.parameters())

    def closure(at: int = 0) -> Any:
        optimizer.zero_grad()
        loss: Any = sum(model(batch).square().mean() for batch in BATCHES[at : at + 2])
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        return loss

    for at in (0, 2):
        optimizer.step(partial(closure, at))
    for found in run_threads(stepped, 2, "DDP", True, lbfgs):
        for name, value in model.state_dict().items():
            assert_equal(found[name], value, name)


def test_each_loss_of_a_step_is_that_of_the_new_values() -> None:
    def program() -> Sequence[float]:
        booster, model, optimizer = boosted("Hybrid, bf16", lbfgs)
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = backward("Hybrid, bf16", booster, model, optimizer)
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        return losses

    for losses in run_threads(program, 2):
        assert len(losses) > 2
        assert losses[-1] < 0.9 * losses[0]


def test_a_closure_under_loss_scaling_is_refused_before_it_runs() -> None:
    def program(plugin: str) -> None:
        _, _, optimizer = boosted(plugin)
        with pytest.raises(UnsupportedError, match="under loss scaling uses gradients that are there"):
            optimizer.step(lambda: pytest.fail("it ran"))

    for plugin in ("ZeRO-2, fp16", "DDP, fp16_naive"):
        run_threads(program, 2, plugin)


@pytest.mark.parametrize("plugin", SHARDED | HALF | GEMINI_HALF | PARTS)
def test_a_step_asks_no_guard(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes several calls in Python, of which a step would have some for each parameter."""
    guard, asked = vars(ClippedByOptimizer)["grad"], list[str]()

    def program() -> None:
        booster, model, optimizer = boosted(plugin, max_norm=0.1)
        backward(plugin, booster, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def note(parameter: nn.Parameter) -> torch.Tensor | None:
        asked.append(type(parameter).__name__)
        return guard.fget(parameter)

    for kind in (ClippedByOptimizer, WorkingParameter):
        monkeypatch.setattr(kind, "grad", property(note, lambda parameter, _grad: note(parameter)))
    run_threads(program, 2)
    assert asked == []


# ---------------------------------------------------------------------------------------------- written values


def write(parameter: nn.Parameter, new: torch.Tensor, how: str, kept: list[Any]) -> None:
    if how == "no_grad":
        with torch.no_grad():
            parameter.copy_(new)
    elif how == "data.copy_":
        parameter.data.copy_(new)
    elif how == "data =":
        parameter.data = new.clone()
    elif how == "a view of data":
        parameter.data.view(-1)[:] = new.view(-1)
    elif how == "an alias of before":
        kept[0].copy_(new)
    else:
        vector_to_parameters(new.reshape(-1), [parameter])


WRITES = ("data.copy_", "data =", "a view of data", "an alias of before", "vector_to_parameters")


def written(plugin: str, how: str) -> Any:
    booster, model, optimizer = boosted(plugin)
    parameter = model.unwrap()[2].weight
    kept = [parameter.data] if how == "an alias of before" else []
    for step in range(3):
        backward(plugin, booster, model, optimizer, step)
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
            new = torch.full(parameter.shape, 0.25 * (step + 1), dtype=parameter.dtype)
            write(parameter, new, how, kept)
            assert torch.equal(parameter.detach(), new)
    optimizer.step()
    return values(model) | {f"master {i}": each.detach().clone() for i, each in enumerate(optimizer.parameters)}


def write_all_ways(plugin: str) -> None:
    expected = written(plugin, "no_grad")
    weight = expected["2.weight"].float()
    assert (weight - 0.75).abs().max() < 0.25, "the written value is lost"
    for how in WRITES:
        assert_same(written(plugin, how), expected)


@pytest.mark.parametrize("plugin", [*(each for each in HALF), "ZeRO-1", "Hybrid, ZeRO-1"])
def test_values_that_are_written_past_torch_count_in_the_next_step(plugin: str) -> None:
    run_threads(write_all_ways, 2, plugin)


def cast(plugin: str) -> list[str]:
    _, model, optimizer = boosted(plugin)
    own = model.unwrap()
    before = [each.detach().clone() for each in optimizer.parameters]
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        if dtype != own[0].weight.dtype:
            with pytest.raises(ConfigError) as raised:
                own.to(dtype)
            found.append(str(raised.value))
    with pytest.raises(ConfigError, match=r"Found other data for one of \(8, 6\) in .*: \(3, 6\) in"):
        own[0].weight.data = own[0].weight.data[:3]
    for each, value in zip(optimizer.parameters, before, strict=True):
        assert torch.equal(each, value)
    return found


@pytest.mark.parametrize("plugin", [*(each for each in HALF), "ZeRO-1", "Hybrid, ZeRO-1"])
def test_casts_and_other_shapes_are_refused_where_master_weights_follow(plugin: str) -> None:
    for messages in run_threads(cast, 2, plugin):
        assert len(messages) == 3
        assert all("Cast, move or resize the model before boost" in each for each in messages)


# ---------------------------------------------------------------------------------------------- pipelines


def in_stages() -> list[list[str]]:
    zero_both_ways("pp2, bf16")
    step_both_ways("pp2, bf16")
    return [clipped_by_torch(plugin) for plugin in PIPELINE]


def test_stages_do_the_same() -> None:
    for found in run_processes(in_stages, 2):
        for messages in found:
            assert all("Call optimizer.clip_grad_by_norm(max_norm)" in message for message in messages)
