# pyright: reportArgumentType=false, reportCallIssue=false
"""Whatever trains, and however many passes bring gradients: they are reduced over ranks, or that is refused."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from equality import assert_equal
from plugins import HYBRID, plugins
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal._src.booster.plugin.ddp.torch_ddp import DDPConfig
from colossal._src.booster.plugin.hybrid.pipelined_model import GradientAverager
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.cluster import current_mesh
from colossal.errors import ColossalError, ConfigError
from colossal.testing import run_threads

DDP = plugins("DDP", "Hybrid") | {
    "DDP, unused": partial(TorchDDPPlugin, find_unused_parameters=True),
    "DDP, views": partial(TorchDDPPlugin, gradient_as_bucket_view=True),
}
PLUGINS = DDP | plugins("FSDP", "ZeRO-1", "ZeRO-2", "Gemini") | {"Hybrid, ZeRO-1": partial(HYBRID, 1, 1, zero_stage=1)}
BATCHES = torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.factor = nn.Parameter(torch.ones(()))  # which cannot be sharded
        self.double()
        with torch.no_grad():  # ranks that are threads draw from one generator
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-0.6, 0.5, parameter.numel()).view_as(parameter).roll(number))
            self.factor.fill_(1.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor

    def freeze(self, names: str) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name[0] not in names)


class Run:
    """A training run of one process or of a rank; `plugin` is None for one process, which sees the joined batch."""

    def __init__(self, plugin: str | None, frozen: str = "") -> None:
        self.own = Net()
        self.own.freeze(frozen)
        self.optimizer: Any = torch.optim.SGD(self.own.parameters(), lr=0.5)
        self.model: Any = self.own
        self.booster = Booster(device="cpu", plugin=None if plugin is None else PLUGINS[plugin]())
        self.model, self.optimizer, *_ = self.booster.boost(self.own, self.optimizer)
        self.is_one = plugin is None

    def batch(self, step: int) -> torch.Tensor:
        return BATCHES[step] if self.is_one else BATCHES[step].chunk(dist.get_world_size())[dist.get_rank()]

    def backward(self, step: int) -> None:
        self.booster.backward(self.model(self.batch(step)).square().mean(), self.optimizer)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        state = self.own.state_dict() if self.is_one else self.model.state_dict(only_rank_0=False)
        return {name: value.detach().clone() for name, value in state.items()}


def thaw(plugin: str | None) -> Any:
    run = Run(plugin, frozen="04f")
    for step, frozen in enumerate(("04f", "04f", "4", "", "", "2")):
        run.own.freeze(frozen)
        run.backward(step)
        run.step()
    return run.state()


def take_turns(plugin: str | None) -> Any:
    """Train layers in turn, without any in one forward pass: as the two halves of a GAN."""
    run = Run(plugin)
    for step, frozen in enumerate(("0", "24f", "0", "24f")):
        run.own.freeze("024f")
        with torch.enable_grad():
            run.model(run.batch(step))
        run.own.freeze(frozen)
        run.backward(step)
        run.step()
    return run.state()


def thaw_while_accumulating(plugin: str | None) -> Any:
    run = Run(plugin, frozen="0f")
    for step in (0, 2):
        with run.booster.no_sync(run.model):
            run.backward(step)
        run.own.freeze("")
        run.backward(step + 1)
        run.step()
    return run.state()


def two_losses(plugin: str | None) -> Any:
    run = Run(plugin)
    for step in range(3):
        outputs = run.model(run.batch(step))
        run.optimizer.backward(outputs.square().mean(), retain_graph=True)
        run.optimizer.backward(outputs.sin().mean(), retain_graph=True)
        run.optimizer.backward_by_grad(
            outputs, torch.full_like(outputs, 0.1 / len(BATCHES[0])) * (1 if run.is_one else 2)
        )
        run.step()
    return run.state()


def two_passes(plugin: str | None) -> Any:
    run = Run(plugin)
    for step in (0, 2):
        outputs = [run.model(run.batch(step + each)) for each in range(2)]
        for each in outputs:
            run.optimizer.backward(each.square().mean())
        run.step()
    return run.state()


def passes_across_no_sync(plugin: str | None) -> Any:
    """Forward passes outside of no_sync, and backward passes inside of it; and the other way round."""
    run = Run(plugin)
    for step in (0, 2):
        first = run.model(run.batch(step))
        with run.booster.no_sync(run.model):
            run.optimizer.backward(first.square().mean())
            second = run.model(run.batch(step + 1))
        run.optimizer.backward(second.square().mean())
        run.step()
    return run.state()


WAYS = (thaw, take_turns, thaw_while_accumulating, two_losses, two_passes, passes_across_no_sync)


def all_ways(plugin: str) -> dict[str, Any]:
    return {way.__name__: way(plugin) for way in WAYS}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_all_gradients_are_reduced(plugin: str) -> None:
    expected = {way.__name__: way(None) for way in WAYS}
    for found in run_threads(all_ways, 2, plugin):
        for way, state in found.items():
            for name, value in state.items():
                assert_equal(value, expected[way][name], f"{way}: {name}")


def unreduced_passes(plugin: str) -> list[str]:
    found = []
    for way in ("plain", "outside of no_sync", "the own model"):
        run = Run(plugin)
        for step in range(2):  # the first is right
            run.model(run.batch(step)).square().mean().backward()
            run.step()
        with run.booster.no_sync(run.model) if "no_sync" in way else nullcontext():
            outputs = (run.model.unwrap() if "own" in way else run.model)(run.batch(2))
        if way == "plain":
            outputs.square().mean().backward(retain_graph=True)
        with pytest.raises(ConfigError) as raised:
            outputs.sin().mean().backward()
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize("plugin", DDP)
def test_a_pass_that_nothing_reduces_is_refused(plugin: str) -> None:
    for messages in run_threads(unreduced_passes, 2, plugin):
        assert all("optimizer.backward(loss, retain_graph=True)" in each for each in messages)


def average_what_was_thawed() -> list[float]:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    first, second = model.parameters()
    first.requires_grad_(False)
    averager = GradientAverager([model], current_mesh(), DDPConfig())
    found = []
    for trains in ((False, True), (True, False), (True, True)):
        for parameter, each in zip((first, second), trains, strict=True):
            parameter.grad = torch.full((1, 1), float(dist.get_rank())) if each else parameter.grad
            parameter.requires_grad_(each)
        averager.average()
        found += [None if each.grad is None else each.grad.item() for each in (first, second)]
    return found


def test_a_pipeline_averages_gradients_of_what_was_frozen_when_it_was_built() -> None:
    assert run_threads(average_what_was_thawed, 2) == [[None, 0.5, 0.5, 0.5, 0.5, 0.5]] * 2


def leave_out(plugin: str, listed: list[str]) -> dict[str, torch.Tensor]:
    """Return the gradients of the second of two passes, before which the program thawed a layer."""
    own = Net()
    own._ddp_params_and_buffers_to_ignore = listed  # as the program would for torch
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.5))
    for frozen in ("2", ""):
        own.freeze(frozen)
        optimizer.zero_grad()
        booster.backward(model(BATCHES[0].chunk(2)[dist.get_rank()]).square().mean(), optimizer)
    return {name: parameter.grad.clone() for name, parameter in own.named_parameters()}


@pytest.mark.parametrize("listed", [["0.weight", "factor"], [name for name, _ in Net().named_parameters()]], ids=len)
@pytest.mark.parametrize("plugin", plugins("DDP", "Hybrid"))
def test_what_the_program_keeps_from_ddp_stays_as_it_is_on_each_rank(plugin: str, listed: list[str]) -> None:
    own = Net()
    halves = []
    for half in BATCHES[0].chunk(2):
        own.zero_grad()
        own(half).square().mean().backward()
        halves.append({name: parameter.grad.clone() for name, parameter in own.named_parameters()})
    for rank, found in enumerate(run_threads(leave_out, 2, plugin, listed)):
        for name, grad in found.items():
            mean = (halves[0][name] + halves[1][name]) / 2
            assert_equal(grad, halves[rank][name] if name in listed else mean, name)


# ---------------------------------------------------------------------------------------------- groups that come later


def add_group(plugin: str | None) -> Any:
    own = Net()
    own.freeze("0f")
    booster = Booster(device="cpu", plugin=None if plugin is None else PLUGINS[plugin]())
    optimizer: Any = torch.optim.SGD([each for each in own.parameters() if each.requires_grad], lr=0.5)
    model, optimizer, *_ = booster.boost(own, optimizer)
    for step in range(3):
        if step == 1:
            own.freeze("")
            added = [*own[0].parameters(), own.factor]
            optimizer.add_param_group({"params": added, "lr": 0.25})
        x = BATCHES[step] if plugin is None else BATCHES[step].chunk(2)[dist.get_rank()]
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        model.zero_grad()
    state = own.state_dict() if plugin is None else model.state_dict(only_rank_0=False)
    return {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_group_of_thawed_parameters_is_trained_as_in_one_process(plugin: str) -> None:
    expected = add_group(None)
    for found in run_threads(add_group, 2, plugin):
        for name, value in found.items():
            assert_equal(value, expected[name], name)


def add_new_module(plugin: str) -> str:
    run = Run(plugin)
    new = nn.Linear(2, 1, bias=False).double()
    groups = len(run.optimizer.param_groups)
    try:
        run.optimizer.add_param_group({"params": list(new.parameters())})
    except ConfigError as error:
        assert len(run.optimizer.param_groups) == groups
        return str(error)
    nn.init.ones_(new.weight)
    run.optimizer.backward(new(run.model(run.batch(0))).square().mean())
    run.optimizer.step()
    return str(new.weight.tolist())


@pytest.mark.parametrize("plugin", PLUGINS)
def test_parameters_that_no_rank_reduces_are_refused(plugin: str) -> None:
    first, second = run_threads(add_new_module, 2, plugin)
    assert first == second
    if "ZeRO" not in plugin:
        assert "Found 1 others" in first or "Found another one" in first


# ---------------------------------------------------------------------------------------------- without an optimizer


def train_alone(plugin: str) -> str:
    model, *_ = Booster(device="cpu", plugin=PLUGINS[plugin]()).boost(Net())
    x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    try:
        model(x).sum().backward()
    except ConfigError as error:
        model.requires_grad_(False)
        model(x).sum().backward()  # through a model that is not trained
        assert x.grad is not None
        with torch.no_grad():
            model(x)
        return str(error)
    return ""


@pytest.mark.parametrize("plugin", ["ZeRO-1", "ZeRO-2"])
def test_a_model_that_was_boosted_alone_is_not_trained_on_the_samples_of_each_rank(plugin: str) -> None:
    for message in run_threads(train_alone, 2, plugin):
        assert "Pass the optimizer to boost" in message
    assert run_threads(train_alone, 1, plugin) == [""]


# ---------------------------------------------------------------------------------------------- reentrant checkpoints


def call_and_checkpoint(plugin: str, *, first: bool, is_reentrant: bool) -> Any:
    run = Run(plugin)
    layer, passes = run.own[2], [run.own[2], partial(checkpoint, run.own[2], use_reentrant=is_reentrant)]
    one, two = passes if first else reversed(passes)
    run.own.forward = lambda x: run.own[4](two(one(run.own[0](x)))) * run.own.factor
    try:
        run.booster.backward(run.model(torch.ones(2, 6, dtype=torch.float64)).square().mean(), run.optimizer)
    except ColossalError as error:
        return str(error)
    return layer.weight.grad


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("plugin", DDP)
def test_a_layer_inside_and_outside_of_a_reentrant_checkpoint_is_refused(plugin: str, first: bool) -> None:
    own = Net()
    output = own[4](own[2](own[2](own[0](torch.ones(2, 6, dtype=torch.float64))))) * own.factor
    output.square().mean().backward()
    for message in run_threads(partial(call_and_checkpoint, first=first, is_reentrant=True), 2, plugin):
        assert "heckpoint layers with use_reentrant=False" in message
    for grad in run_threads(partial(call_and_checkpoint, first=first, is_reentrant=False), 2, plugin):
        assert_equal(grad, own[2].weight.grad, plugin)
