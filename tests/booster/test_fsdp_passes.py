# pyright: reportArgumentType=false, reportCallIssue=false
"""Passes that end by an exception, in inference mode, or of other units on other ranks; empty parameters."""

from functools import partial
from typing import Any

import pytest
import torch
from plugins import plugins
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import TorchFSDPPlugin
from colossal.errors import CommunicationError, ConfigError, UnsupportedError
from colossal.testing import assert_close, run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1") | {
    "FSDP, SHARD_GRAD_OP": partial(TorchFSDPPlugin, sharding_strategy="SHARD_GRAD_OP")
}
DATA = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(5)).double()


class Fault(torch.autograd.Function):
    """Raises an error when it is told to, as a device without memory does."""

    where = ""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Fault.where == "forward":
            raise torch.OutOfMemoryError("simulated")
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fault.where == "backward":
            raise torch.OutOfMemoryError("simulated")
        return grad


class Net(nn.Module):
    """Units in a list, a fault in the middle of them, and a layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.none = nn.Linear(8, 0)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            x = Fault.apply(x) if number == 1 else x
        return self.last(torch.cat([x, self.none(x)], -1))


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net().double()
    return net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)


def train_alone(skipped: dict[int, str]) -> dict[str, torch.Tensor]:
    net, optimizer = make()
    for number, x in enumerate(DATA):
        if number not in skipped:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in net.state_dict().items()}


def go_on(plugins: list[str], faults: list[dict[int, str]], expected: list[dict[str, torch.Tensor]]) -> None:
    for plugin in plugins:
        for where, wanted in zip(faults, expected, strict=True):
            net, optimizer = make()
            booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
            model, optimizer, *_ = booster.boost(net, optimizer)
            rank, size = booster.plugin.data_parallel_rank_and_size()
            for number, x in enumerate(DATA):
                Fault.where = where.get(number, "")
                try:
                    booster.backward(model(x.chunk(size)[rank]).square().mean(), optimizer)
                    optimizer.step()
                except torch.OutOfMemoryError:
                    assert number in where
                optimizer.zero_grad()
            for name, value in model.state_dict(only_rank_0=False).items():
                torch.testing.assert_close(value, wanted[name], msg=lambda text, at=f"{plugin}, {name}: ": at + text)


def test_a_batch_that_ends_by_an_exception_is_skipped() -> None:
    faults: list[dict[int, str]] = [{}, {1: "backward"}, {0: "backward", 2: "forward", 3: "backward"}]
    run_processes(go_on, 2, list(PLUGINS), faults, [train_alone(each) for each in faults])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        y = self.gate(x)
        for number in chosen:
            y = y + self.experts[number](y)
        return y


def refuse_passes() -> None:
    rank = torch.distributed.get_rank()
    net = Experts()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)
    booster = Booster(device="cpu", plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(2, 6)
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=r"Use torch\.no_grad\(\)"):
        model(x, [0])
    for chosen in ([0], [0], [2, 1], [0, 0]):  # ranks may use other units than before, if all of them do
        booster.backward(model(x, chosen).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(x, [1, 2])
    for chosen in ([0], [1]), ([0, 2], [2, 0]):  # of equal sizes
        with pytest.raises(ConfigError, match=rf"Found that ranks differ; this one called experts\.{chosen[rank][0]}"):
            model(x, chosen[rank])
    booster.backward(model(x, [1]).mean(), optimizer)
    optimizer.step()
    with pytest.raises(CommunicationError) as error:  # only one rank calls what it did not call before
        booster.backward(model(x, [1 + rank]).mean(), optimizer)
    assert not rank or "this one called experts.2" in error.value.__notes__[0]


def test_passes_that_would_be_wrong_are_refused() -> None:
    run_processes(refuse_passes, 2)


def forget_to_discard() -> None:
    net, optimizer = make()
    booster = Booster(device="cpu", plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(net, optimizer)
    Fault.where = "backward"
    with pytest.raises(torch.OutOfMemoryError):
        booster.backward(model(DATA[0]).mean(), optimizer)
    Fault.where = ""
    with pytest.raises(ConfigError, match=r"Call optimizer\.zero_grad\(\) on all ranks"):
        model(DATA[0])
    optimizer.zero_grad()
    Fault.where = "forward"
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(DATA[0])
    Fault.where = ""
    booster.backward(model(DATA[0]).mean(), optimizer)  # a forward pass leaves no gradients
    optimizer.step()


def test_gradients_of_a_pass_that_failed_are_not_kept() -> None:
    run_processes(forget_to_discard, 2)


def train_on_features(plugin: Any, through_output: bool) -> dict[str, torch.Tensor]:
    """Discard the gradients of a pass, then train, by losses of what a hook takes from inside of the model."""
    torch.manual_seed(0)
    model, features = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double(), list[torch.Tensor]()
    model[1].register_forward_hook(lambda *forward: features.append(forward[-1]))
    booster, rank = Booster(device="cpu", plugin=plugin), 0 if plugin is None else torch.distributed.get_rank()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    for step, x in enumerate(DATA[:3]):
        output = boosted(x if plugin is None else x.chunk(2)[rank])
        loss = features.pop().square().mean()
        booster.backward(loss + 0 * output.sum() if through_output else loss, optimizer)
        if step or not through_output:
            optimizer.step()
        optimizer.zero_grad()
    return boosted.state_dict(only_rank_0=False)


def train_on_features_all() -> tuple[list[Any], list[str]]:
    names, messages = ("FSDP", "FSDP, SHARD_GRAD_OP"), []
    for name in names:
        with pytest.raises(ConfigError) as raised:
            train_on_features(PLUGINS[name](), through_output=False)
        messages.append(str(raised.value))
    return [train_on_features(PLUGINS[name](), through_output=True) for name in names], messages


def discard_features() -> dict[str, torch.Tensor]:
    """Discard gradients that no unit reduced, and go on."""
    torch.manual_seed(0)
    model, features = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)).double(), list[torch.Tensor]()
    handle = model[0].register_forward_hook(lambda *forward: features.append(forward[-1]))
    booster = Booster(device="cpu", plugin=TorchFSDPPlugin() if torch.distributed.is_initialized() else None)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    boosted(DATA[0])
    booster.backward(features.pop().square().mean(), optimizer)
    optimizer.zero_grad()
    handle.remove()
    booster.backward(boosted(DATA[1]).square().mean(), optimizer)
    optimizer.step()
    return boosted.state_dict(only_rank_0=False)


def test_gradients_that_no_unit_reduces_are_refused_or_discarded() -> None:
    expected, discarded = train_on_features(None, through_output=True), discard_features()
    for found, messages in run_processes(train_on_features_all, 2):
        assert "add 0 * output.sum() to the loss" in messages[0]
        assert "which nothing reduces over ranks" in messages[1]
        assert_close(found, [expected, expected])
    for found in run_processes(discard_features, 2):
        assert_close(found, discarded)
