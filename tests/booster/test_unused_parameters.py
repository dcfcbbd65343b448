# pyright: reportArgumentType=false, reportCallIssue=false
"""Parameters that a pass does not use, second backward passes, and models that train later, are right or refused."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality import assert_equal
from plugins import plugins
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.errors import ColossalError, UnsupportedError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid")
PLUGINS |= {f"{name}, find": partial(PLUGINS[name], find_unused_parameters=True) for name in ("DDP", "Hybrid")}
DATA = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
FACTORS = {"one": ((1, 1), (1, 0)), "none": ((1, 0), (1, 0)), "other": ((1, 0), (0, 1)), "all": ((1, 1), (1, 1))}
"""How each of two ranks weights two branches: 0 leaves one out, but for `is_called`."""
LEFT_OUT = ("one", "none", "other")


class Branches(nn.Module):
    def __init__(self, *, is_called: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.linspace(-1, 1, 24).double().view(4, 6)) for _ in range(2))
        self.last = nn.Parameter(torch.linspace(-1, 2, 4).double())
        self.is_called = is_called

    def forward(self, x: torch.Tensor, factors: tuple[int, int]) -> torch.Tensor:
        y = x.new_zeros(4)
        for branch, factor in zip((self.first, self.second), factors, strict=True):
            if factor or self.is_called:
                y = y + factor * torch.tanh(x @ branch.T)
        return y @ self.last


def train(kind: str, booster: Any, model: nn.Module, optimizer: Any) -> None:
    for x in DATA:
        for rank, half in enumerate(x.chunk(2)):
            if booster is None:
                (model(half, FACTORS[kind][rank]).square().mean() / 2).backward()
            elif rank == dist.get_rank():
                booster.backward(model(half, FACTORS[kind][rank]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def boosted(plugin: str, model: nn.Module) -> tuple[Booster, Any, Any]:
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    return booster, model, optimizer


def train_branches(cases: list[tuple[str, str, bool]]) -> Any:
    found = {}
    for plugin, kind, is_called in cases:
        booster, model, optimizer = boosted(plugin, Branches(is_called=is_called))
        train(kind, booster, model, optimizer)
        found[plugin, kind, is_called] = model.state_dict(only_rank_0=False)
    return found


def test_branches_that_some_ranks_leave_out_train_as_in_one_process() -> None:
    found = ("DDP, find", "ZeRO-2", "Gemini")
    cases = [
        *((plugin, kind, False) for plugin in found for kind in LEFT_OUT),
        *((plugin, kind, True) for plugin in ("FSDP", "Hybrid") for kind in LEFT_OUT),
        ("FSDP", "none", False),
    ]
    for rank in run_processes(train_branches, 2, cases):
        for (plugin, kind, is_called), state in rank.items():
            model = Branches(is_called=is_called)
            train(kind, None, model, torch.optim.SGD(model.parameters(), lr=0.3))
            for name, value in model.state_dict().items():
                assert_equal(state[name], value, f"{plugin}, {kind}, {name}")


class InParts(Branches):
    """Each branch has a pass of its own, or the outputs are in an object in which nobody finds tensors."""

    def forward(self, x: torch.Tensor, factors: tuple[int, int]) -> Any:
        return SimpleNamespace(outputs=super().forward(x, factors))


def train_in_parts(plugins: list[str]) -> dict[str, Any]:
    found = {}
    for plugin in plugins:
        booster, optimizer, share = None, None, slice(None)
        model: Any = InParts()
        if plugin:
            booster, model, optimizer = boosted(plugin, model)
            share = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.3)
        for step, x in enumerate(DATA[:, share]):
            one, other = ((1, 1),) * 2 if step == 1 else ((1, 0), (0, 1))
            loss = (model(x, one).outputs * model(x + 1, other).outputs).mean()
            loss.backward() if booster is None else booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found[plugin] = model.state_dict(only_rank_0=False) if plugin else model.state_dict()
    return found


def test_parameters_are_found_by_the_loss_of_several_passes_and_of_outputs_in_objects() -> None:
    (expected,) = train_in_parts([""]).values()
    for rank in run_processes(train_in_parts, 2, ["DDP, find", "Hybrid, find", "ZeRO-2", "Gemini"]):
        for plugin, state in rank.items():
            for name, value in expected.items():
                assert_equal(state[name], value, f"{plugin}, {name}")


def fail(plugin: str, kind: str) -> tuple[str, str]:
    booster, model, optimizer = boosted(plugin, Branches())
    try:
        train(kind, booster, model, optimizer)
    except (ColossalError, RuntimeError) as error:
        return type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())])
    return "", ""


def test_one_rank_has_nothing_to_reduce() -> None:
    assert run_processes(fail, 1, "DDP", "none") == [("", "")]


@pytest.mark.parametrize(
    ("plugin", "kind"), [*((p, k) for p in ("DDP", "Hybrid") for k in LEFT_OUT), ("FSDP", "one"), ("FSDP", "other")]
)
def test_an_error_names_the_option_or_plugin_that_takes_them(plugin: str, kind: str) -> None:
    ranks = run_processes(fail, 2, plugin, kind)
    assert all("find_unused_parameters=True" in text for _, text in ranks), ranks
    if plugin != "FSDP":  # the rank that waits for the other's gradients finds that it left
        assert ("ConfigError" in [name for name, _ in ranks]) or kind == "other"
    if kind == "none":
        assert all("(second)" in text for _, text in ranks)


def penalize(plugin: str) -> Any:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def loss_of(called: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        outputs = called(x)
        (grad,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return outputs.square().mean() + grad.square().sum(1).mean()

    if plugin == "":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        loss_of(model, DATA[0]).backward()
        optimizer.step()
        return model.state_dict()
    booster, boosted_model, optimizer = boosted(plugin, model)
    try:
        booster.backward(loss_of(boosted_model, DATA[0].chunk(2)[dist.get_rank()]), optimizer)
    except UnsupportedError as error:
        return str(error)
    optimizer.step()
    return boosted_model.state_dict(only_rank_0=False)


def penalize_all(_: None) -> dict[str, Any]:
    return {plugin: penalize(plugin) for plugin in PLUGINS}


def test_gradient_penalties_are_those_of_one_process_or_refused() -> None:
    expected = penalize("")
    for rank in run_processes(penalize_all, 2, None):
        assert "GeminiPlugin" in rank.pop("FSDP")
        for plugin, state in rank.items():
            for name, value in expected.items():
                assert_equal(state[name], value, f"{plugin}, {name}")


def thaw(plugin: str) -> Any:
    model = Branches().requires_grad_(False)
    if plugin and dist.get_rank():
        nn.init.zeros_(model.last)  # the values of the first rank count
    booster, optimizer = None, torch.optim.SGD(model.parameters(), lr=0.3)
    boosted_model: Any = model
    if plugin:
        booster, boosted_model, optimizer = boosted(plugin, model)
        with booster.no_sync(boosted_model), torch.no_grad():
            boosted_model(DATA[0], (1, 1))
        optimizer.zero_grad()
    model.second.requires_grad_(True)
    train("all", booster, boosted_model, optimizer)
    return boosted_model.state_dict(only_rank_0=False) if plugin else model.state_dict()


@pytest.mark.parametrize("plugin", ["DDP", "Hybrid"])
def test_a_model_in_which_nothing_trained_at_boost_trains_later(plugin: str) -> None:
    expected = thaw("")
    for state in run_processes(thaw, 2, plugin):
        for name, value in expected.items():
            assert_equal(state[name], value, f"{plugin}, {name}")


def run_longer(plugin: str) -> str:
    """One rank has a batch more."""
    booster, model, optimizer = boosted(plugin, nn.Linear(6, 2).double())
    try:
        for x in DATA[: 2 + dist.get_rank()]:
            booster.backward(model(x).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    except (ColossalError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plugin", ["DDP", "FSDP", "ZeRO-1", "Gemini"])
def test_a_batch_more_on_one_rank_names_the_remedy(plugin: str) -> None:
    first, second = run_processes(run_longer, 2, plugin)
    assert first == ""
    assert "drop_last=True" in second
