"""Training loops of programs, under plugins and in one process, and how the two are compared."""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from plugins import plugins
from small_models import BATCHES, net
from torch import distributed as dist

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin
from colossal.errors import ColossalError
from colossal.testing import reuse_processes, run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "Hybrid", "Hybrid with ZeRO-1")
SHARDED = ("ZeRO-1", "ZeRO-2", "Gemini", "Hybrid with ZeRO-1")
REPLICATED = ("DDP", "Hybrid")
SLOW = ("ZeRO-2", "Hybrid", "Hybrid with ZeRO-1")  # whose parts the others have
Values = Mapping[str, torch.Tensor]


class Loop:
    """What a program has: a booster, or in one process none, and its part of a batch."""

    def __init__(self, plugin: str | None) -> None:
        self.booster = None if plugin is None else Booster(device="cpu", plugin=PLUGINS[plugin]())
        self.rank, self.size = (0, 1) if plugin is None else (dist.get_rank(), dist.get_world_size())

    def boost(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return (model, optimizer) if self.booster is None else self.booster.boost(model, optimizer)[:2]

    def start(self, **options: Any) -> tuple[Any, Any]:
        model, settings = net(""), {"lr": 0.3, "momentum": 0.9, **options}
        return self.boost(model, torch.optim.SGD(model.parameters(), **settings))

    def start_with_gradients(self) -> tuple[Any, Any]:
        model, optimizer = self.start()
        self.run_pass(model, optimizer, BATCHES[0])
        self.unscale(optimizer)
        return model, optimizer

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(self.size)[self.rank].clone()

    def backward(self, loss: torch.Tensor, optimizer: Any, **options: Any) -> None:
        loss.backward(**options) if self.booster is None else self.booster.backward(loss, optimizer, **options)

    def run_pass(self, model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = model(self.own(batch)).square().mean()
        self.backward(loss, optimizer)
        return loss.detach()

    def train(self, model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = self.run_pass(model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def train_all(self, model: Any, optimizer: Any, change: Callable[[], None] | None = None) -> "Values":
        """Train on all batches; `change` is called when a step's gradients are there."""
        for batch in BATCHES:
            self.run_pass(model, optimizer, batch)
            if change is not None:
                self.unscale(optimizer)
                change()
            optimizer.step()
            optimizer.zero_grad()
        return self.values(model)

    def unscale(self, optimizer: Any) -> None:
        if self.booster is not None:
            optimizer.unscale_grad()

    def no_sync(self, model: Any) -> Any:
        return nullcontext() if self.booster is None else self.booster.no_sync(model)

    def original(self, model: Any) -> Any:
        return model if self.booster is None else model.unwrap()

    def load(self, model: Any, state: Values) -> None:
        is_wrapped = isinstance(getattr(self.booster, "plugin", None), GeminiPlugin)  # which has no values elsewhere
        (model if is_wrapped else self.original(model)).load_state_dict(state)

    def values(self, model: Any) -> Values:
        state = model.state_dict() if self.booster is None else model.state_dict(only_rank_0=False)
        return {name: each.detach().clone() for name, each in state.items()}


Program = Callable[[Loop], Values]
Refused = Mapping[Program, Mapping[str, str]]
"""What each plugin refuses of programs, and what the error says to do; "" where it is not tried."""


def run_loops(programs: Refused, plugin: str) -> list[Values | str]:
    """Run the programs whose result is known, in one world."""
    return [_result_of(program, plugin) for program in _tried(programs, plugin)]


def _tried(programs: Refused, plugin: str) -> list[Program]:
    return [program for program, refused in programs.items() if refused.get(plugin) != ""]


def _result_of(program: Program, plugin: str) -> Values | str:
    try:
        return program(Loop(plugin))
    except ColossalError as error:
        return str(error)


def check_loops(programs: Refused, plugin: str, run: Callable[[str], list[Values | str]]) -> None:
    """Compare what programs train under a plugin with one process, or what the refusals of them say.

    `run` is a function of the test's own file, which calls `run_loops`: the ranks find it there.
    """
    with reuse_processes():
        ranks = run_processes(run, 2, plugin)
    for results in ranks:
        for program, result in zip(_tried(programs, plugin), results, strict=True):
            if wanted := programs[program].get(plugin):
                assert isinstance(result, str), f"{program.__name__} is not refused"
                assert re.search(wanted, result), f"{program.__name__}: {result}"
                continue
            assert not isinstance(result, str), f"{program.__name__}: {result}"
            for name, value in program(Loop(None)).items():
                torch.testing.assert_close(
                    result[name], value, rtol=1e-8, atol=1e-12, msg=lambda text, at=program: f"{at.__name__}: {text}"
                )
