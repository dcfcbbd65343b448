"""Loops that users write around a step: equal to those of one process, or refused with what to do."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from loops import PLUGINS, REPLICATED, SHARDED, SLOW, Loop, Refused, Values, check_loops, run_loops
from small_models import BATCHES, net
from torch import distributed as dist
from torch import nn

IDS = (torch.arange(24) * 7 % 10).view(3, 8)


def leave_over(loop: Loop) -> Values:
    """Two batches make a step; the third is left inside of no_sync when the loop ends."""
    model, optimizer = loop.start()
    for number in range(3):
        with nullcontext() if number % 2 else loop.no_sync(model):
            loop.backward(model(loop.own(BATCHES[number])).square().mean() / 2, optimizer)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return loop.values(model)


def discard_left_over(loop: Loop) -> Values:
    model, optimizer = loop.start()
    for number in range(3):
        with nullcontext() if number % 2 == 0 else loop.no_sync(model):
            loop.run_pass(model, optimizer, BATCHES[number])
        if number % 2 == 0:
            optimizer.step()
        optimizer.zero_grad()
    optimizer.step()
    return loop.values(model)


def average_by_hand(loop: Loop) -> Values:
    """The program reduces gradients by itself, of passes inside of no_sync."""
    model, optimizer = loop.start()
    for batch in BATCHES:
        with loop.no_sync(model):
            loop.run_pass(model, optimizer, batch)
        for parameter in model.parameters() if loop.booster is not None else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= loop.size
        optimizer.step()
        optimizer.zero_grad()
    return loop.values(model)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, whose zero_grad is torch's."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def wrap_optimizer(loop: Loop) -> Values:
    model, optimizer = loop.start()
    outer = Lookahead(optimizer)
    for batch in BATCHES:
        loop.run_pass(model, optimizer, batch)
        outer.step()
        outer.zero_grad()
    return loop.values(model)


def begin_with_gradients(loop: Loop) -> Values:
    """A backward pass before boost, of this rank's samples; the first step adds its gradients."""
    model = net("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model(loop.own(BATCHES[0])).square().mean().backward()
    model, optimizer = loop.boost(model, optimizer)
    loop.run_pass(model, optimizer, BATCHES[1])
    optimizer.step()
    optimizer.zero_grad()
    return loop.values(model)


def keep_graph(loop: Loop) -> Values:
    model, optimizer = loop.start()
    for batch in BATCHES:
        outputs = model(loop.own(batch))
        loop.backward(outputs.square().mean(), optimizer, retain_graph=True)
        loop.backward(outputs.abs().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return loop.values(model)


def _jacobian(loop: Loop, of: Callable[[Loop, Any], Any]) -> Values:
    model, optimizer = loop.start()
    for batch in BATCHES[:2]:
        own = loop.own(batch)
        jacobian = torch.func.vmap(torch.func.jacrev(of(loop, model)))(own)
        loop.backward(jacobian.square().mean() + model(own).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return loop.values(model)


def transform(loop: Loop) -> Values:
    return _jacobian(loop, lambda _, model: model)


def transform_original(loop: Loop) -> Values:
    return _jacobian(loop, Loop.original)


def map_samples(loop: Loop) -> Values:
    model, optimizer = loop.start()
    loop.backward(torch.func.vmap(model)(loop.own(BATCHES[0])).square().mean(), optimizer)
    optimizer.step()
    return loop.values(model)


def differentiate_twice(loop: Loop) -> Values:
    """The Hessian with respect to inputs, outside of a loss."""
    model, optimizer = loop.start()
    found = torch.autograd.functional.hessian(lambda inputs: model(inputs).square().sum(), BATCHES[0][:1])
    loop.train(model, optimizer, BATCHES[1])
    assert isinstance(found, torch.Tensor)
    return {"hessian": found, **loop.values(model)}


def copy_original(loop: Loop) -> Values:
    model, optimizer = loop.start()
    average = copy.deepcopy(loop.original(model))
    loop.train(model, optimizer, BATCHES[0])
    with torch.no_grad():
        for kept, parameter in zip(average.parameters(), loop.original(model).parameters(), strict=True):
            kept.lerp_(parameter, 0.5)
    return dict(average.state_dict())


def roll_back(loop: Loop) -> Values:
    """Values of before are loaded into the model that was boosted."""
    model, optimizer = loop.start()
    first = loop.values(model)
    for batch in BATCHES:
        loop.train(model, optimizer, batch)
    loop.original(model).load_state_dict(first)
    loop.train(model, optimizer, BATCHES[0])
    return loop.values(model)


def _embed(loop: Loop, *, max_norm: float | None, trains: bool = True) -> tuple[Any, Callable[[], None]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(10, 6, max_norm=max_norm), nn.Linear(6, 2)).double()
    model[0].requires_grad_(trains)
    model, optimizer = loop.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))

    def train() -> None:
        for ids in IDS:
            loop.run_pass(model, optimizer, ids)
            optimizer.step()
            optimizer.zero_grad()
            if max_norm is None:
                with torch.no_grad():
                    loop.original(model)[0].weight.renorm_(2, 0, 0.5)

    return model, train


def scale_read_rows(loop: Loop) -> Values:
    model, train = _embed(loop, max_norm=0.5)
    train()
    return loop.values(model)


def scale_frozen_rows(loop: Loop) -> Values:
    model, train = _embed(loop, max_norm=0.5, trains=False)
    train()
    return {name: each for name, each in loop.values(model).items() if not name.startswith("0.")}


def scale_all_rows(loop: Loop) -> Values:
    model, train = _embed(loop, max_norm=None)
    train()
    return loop.values(model)


GATHERED = ("FSDP", "Gemini")
# what each plugin refuses, and what the error says to do
REFUSED: Refused = {
    leave_over: dict.fromkeys((*REPLICATED, "FSDP"), "outside of no_sync"),
    discard_left_over: {},
    average_by_hand: {"ZeRO-2": "holds its gradient", "Gemini": "holds its gradient", "FSDP": ""},
    wrap_optimizer: dict.fromkeys(SHARDED, "Discard gradients by zero_grad"),
    begin_with_gradients: {},
    keep_graph: {},
    transform: dict.fromkeys(("DDP", "Hybrid", "FSDP", "Gemini"), r"jacrev\(model.unwrap"),
    transform_original: {"FSDP": "which torch.func does not differentiate", "Gemini": "Between passes"},
    differentiate_twice: {"FSDP": ""},
    copy_original: {"FSDP": "Copy the model before boost", "Gemini": "Between passes"},
    roll_back: {"Gemini": r"call model.load_state_dict\(state\)"},
    map_samples: {},
    scale_read_rows: dict.fromkeys((*REPLICATED, *SHARDED, "FSDP"), r"weight.renorm_\(2, 0, 0.5\)"),
    scale_frozen_rows: dict.fromkeys(GATHERED, r"weight.renorm_\(2, 0, 0.5\)"),
    scale_all_rows: {"Gemini": "Between passes"},
}


def train_all(plugin: str) -> list[Values | str]:
    return run_loops(REFUSED, plugin)


@pytest.mark.parametrize(
    "plugin", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PLUGINS]
)
def test_loops_train_as_in_one_process_or_are_refused(plugin: str) -> None:
    check_loops(REFUSED, plugin, train_all)
