# pyright: reportArgumentType=false, reportCallIssue=false
"""What a program does with parameters, gradients and states that FSDP2 shards is what it would do with full ones."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, TorchFSDPPlugin
from colossal.errors import ColossalError, CommunicationError, ConfigError, UnsupportedError
from colossal.testing import run_processes

DATA = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
Write = Callable[[Any], object]


def ones(weight: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.ones(*(shape or weight.shape), dtype=weight.dtype)


def lerp(weight: Any) -> None:
    average = ones(weight)
    average.lerp_(weight, 0.3)
    torch._foreach_lerp_([average], [weight], 0.3)
    weight.copy_(0.5 * average + weight)


WRITES: dict[str, Write] = {
    "data is assigned": lambda weight: setattr(weight, "data", weight.data.clamp(-0.2, 0.2)),
    "full data is assigned": lambda weight: setattr(weight, "data", ones(weight)),
    "full data is copied": lambda weight: weight.data.copy_(ones(weight)),
    "full data is added": lambda weight: weight.data.add_(ones(weight, 6)),
    "uniform": nn.init.kaiming_uniform_,
    "normal": lambda weight: weight.data.normal_(0, 0.1),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.1),
    "orthogonal": nn.init.orthogonal_,
    "eye": nn.init.eye_,
    "sparse": lambda weight: nn.init.sparse_(weight, 0.1),
    "noise": lambda weight: weight.add_(torch.randn_like(weight) * 0.1),
    "a row": lambda weight: weight[5].zero_(),
    "rows": lambda weight: weight.data[2:6][:, 1:3].mul_(3.0),
    "rows are assigned": lambda weight: weight.data.__setitem__(slice(1, 3), ones(weight, 2, 6)),
    "a column": lambda weight: weight[:, 0].zero_(),
    "by a mask": lambda weight: weight.data.__setitem__(weight.data > 0, 0.0),
    "chunks": lambda weight: [chunk.mul_(2.0 + number) for number, chunk in enumerate(weight.data.chunk(2))],
    "row norms": lambda weight: weight.copy_(torch.renorm(weight, 2, 0, 0.5)),
    "out": lambda weight: torch.mul(weight, 2.0, out=weight.data),
    "an average": lerp,
}


def build(plugin: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    booster = Booster(device="cpu", plugin=TorchFSDPPlugin() if plugin else None)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3))
    return booster, boosted, optimizer


def step(booster: Any, boosted: Any, optimizer: Any, number: int) -> None:
    x = DATA[number].chunk(2)[dist.get_rank()] if dist.is_initialized() else DATA[number]
    booster.backward(boosted(x).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def write(plugin: bool, name: str) -> Any:
    booster, boosted, optimizer = build(plugin)
    step(booster, boosted, optimizer, 0)
    torch.manual_seed(9)
    with torch.no_grad():
        WRITES[name](boosted.unwrap()[0].weight)
    step(booster, boosted, optimizer, 1)
    return boosted.state_dict(only_rank_0=False)


def read(plugin: bool) -> list[float]:
    booster, boosted, optimizer = build(plugin)
    booster.backward(boosted(DATA[0].chunk(2)[dist.get_rank()] if plugin else DATA[0]).square().mean(), optimizer)
    numbers = [float(torch.cat([parameter.detach().flatten() for parameter in boosted.parameters()]).norm())]
    for parameter in boosted.parameters():
        values = parameter.detach()
        numbers += [float(values.norm()), values.max().item(), int((values > 0).sum()), float(values[1].sum())]
        numbers += [float(parameter.grad.norm()), parameter.grad.abs().max().item()]
        numbers += [float(values.numpy().sum()), float(torch.tensor(values.tolist()).sum())]
    optimizer.step()
    numbers += [float(optimizer.state[parameter]["exp_avg"].norm()) for parameter in boosted.parameters()]
    assert all(torch.allclose(parameter, parameter) for parameter in boosted.parameters())
    return numbers


def assign_gradients(plugin: bool) -> Any:
    _, boosted, optimizer = build(plugin)
    for _ in range(2):
        for parameter in boosted.parameters():
            parameter.grad = (0.5 + dist.get_rank() if plugin else 1.0) * ones(parameter)
        optimizer.step()
    return boosted.state_dict(only_rank_0=False)


def load_full(plugin: bool) -> Any:
    booster, boosted, optimizer = build(plugin)
    step(booster, boosted, optimizer, 0)
    boosted.unwrap().load_state_dict({name: ones(value) for name, value in boosted.unwrap().state_dict().items()})
    step(booster, boosted, optimizer, 1)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain.load_state_dict(boosted.unwrap().state_dict())
    return plain.state_dict()


PROGRAMS: dict[str, Callable[[bool], Any]] = {name: partial(write, name=name) for name in WRITES} | {
    "numbers": read,
    "gradients are assigned": assign_gradients,
    "a full state is loaded": load_full,
}


def run_all() -> dict[str, Any]:
    return {name: program(True) for name, program in PROGRAMS.items()}


def test_values_are_those_of_full_parameters() -> None:
    wanted = {name: program(False) for name, program in PROGRAMS.items()}
    for found in run_processes(run_all, 2):
        for name, want in wanted.items():
            torch.testing.assert_close(found[name], want, msg=lambda text, at=name: f"{at}: {text}")


def refuse() -> None:
    booster, boosted, optimizer = build(True)
    own, weight = boosted.unwrap(), boosted.unwrap()[0].weight
    with pytest.raises(ConfigError, match="Cast, move or resize the model before boost"):
        weight.data = weight.data.float()
    with pytest.raises(ConfigError, match="Leave assign=True out"):
        own.load_state_dict(own.state_dict(), assign=True)
    with pytest.raises(UnsupportedError, match=r"Found unbind.*parameter\.full_tensor\(\)"):
        next(iter(weight))
    with pytest.raises(UnsupportedError, match="Use weight_decay of the optimizer"):
        _ = (weight * ones(weight)).sum()
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1.0
    for plugin in (TorchFSDPPlugin(), GeminiPlugin(precision="fp32")):
        with pytest.raises(UnsupportedError, match=r"Found max_norm=1\.0 in 0.*or LowLevelZeroPlugin"):
            Booster(device="cpu", plugin=plugin).boost(nn.Sequential(nn.Embedding(4, 6, max_norm=1.0)))
    with pytest.raises(ConfigError, match=r"For torch\.func\.functional_call with other values take TorchDDPPlugin"):
        torch.func.functional_call(own, {"0.weight": ones(weight)}, (DATA[0],))
    copied = deepcopy(weight)
    assert type(copied) is DTensor
    assert b"GuardedShard" not in pickle.dumps(weight.detach())
    assert copied.requires_grad
    optimizer.zero_grad()
    step(booster, boosted, optimizer, 0)


def test_what_cannot_be_done_with_shards_is_refused() -> None:
    run_processes(refuse, 2)


def print_on_one() -> str:
    _, boosted, _ = build(True)
    try:
        norm = boosted.unwrap()[0].weight.detach().norm()
        if dist.get_rank() == 0:
            norm.item()
        else:
            boosted(DATA[0])
    except (ColossalError, CommunicationError) as error:
        return str(error)
    return ""


def test_a_number_that_one_rank_asks_for_is_refused() -> None:
    assert "not on some of them, as under `if rank == 0`" in run_processes(print_on_one, 2)[0]
