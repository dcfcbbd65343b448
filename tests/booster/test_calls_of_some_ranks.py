# pyright: reportArgumentType=false
"""What all ranks do together, called on rank 0 only, as one does without shards: an error there says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import plugins
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.errors import ColossalError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-2", "Gemini")
CALLS = ("save", "save_model", "save_optimizer", "norm", "state_dict")
QUICK = [("save_model", "DDP"), ("state_dict", "FSDP"), ("norm", "ZeRO-2"), ("state_dict", "Gemini")]
SLOW = [(call, plugin) for call in CALLS for plugin in PLUGINS if (call, plugin) not in QUICK]
ALONE = [("norm", "DDP"), ("state_dict", "DDP"), ("state_dict", "ZeRO-2")]  # full on each rank, which needs no other


def make_call(call: str, booster: Booster, model: Any, optimizer: Any, path: Path) -> None:
    if call == "save":
        booster.save(path, model, optimizer, step=1)
    elif call == "save_model":
        booster.save_model(model, path / "file")
    elif call == "save_optimizer":
        booster.save_optimizer(optimizer, path / "file")
    elif call == "norm":
        optimizer.get_grad_norm()
    else:
        model.state_dict(only_rank_0=True)


def call_on_rank_0(call: str, plugin: str, path: Path) -> tuple[str, str]:
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=0.1))
    try:
        for step in range(3):
            booster.backward(boosted(torch.ones(4, 6, dtype=torch.float64)).square().mean(), optimizer)
            if step == 1 and dist.get_rank() == 0:
                make_call(call, booster, boosted, optimizer, path)
            optimizer.step()
            optimizer.zero_grad()
    except ColossalError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("call", "plugin"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in ALONE)]
)
def test_a_call_on_one_rank_only_is_refused_by_name(call: str, plugin: str, tmp_path: Path) -> None:
    (first, said), (second, elsewhere) = run_processes(call_on_rank_0, 2, call, plugin, tmp_path)
    assert first == second == "CommunicationError"
    assert "on all ranks, not on some of them, as under `if rank == 0`" in said
    assert "rank 0 called" in elsewhere


@pytest.mark.parametrize(
    ("call", "plugin"), [ALONE[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in ALONE[1:])]
)
def test_a_call_that_needs_no_other_rank_is_made_on_one(call: str, plugin: str, tmp_path: Path) -> None:
    assert run_processes(call_on_rank_0, 2, call, plugin, tmp_path) == [("", ""), ("", "")]
