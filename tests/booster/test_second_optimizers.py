# pyright: reportArgumentType=false, reportCallIssue=false
"""Another optimizer of a boosted model, and a pickle of it, train and hold what they should, or say what to do."""

import pickle
from typing import Any

import torch
from plugins import plugins
from torch import nn

from colossal.booster import Booster
from colossal.errors import ColossalError
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def attempt(kind: str, plugin: str) -> str:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model: Any
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    first, before = (model, optimizer), model.state_dict(only_rank_0=False)
    try:
        if kind == "pickled":
            pickle.dumps(model)
            return ""
        other: Any = torch.optim.Adam(own.parameters(), lr=0.1)
        if kind == "boosted":
            model, other, *_ = booster.boost(own, other)
            optimizer = other
        booster.backward(model(X).square().mean(), optimizer)
        other.step()
    except ColossalError as error:
        return str(error)
    assert first[0] is model or kind == "boosted"
    moved = [not torch.equal(before[name], value) for name, value in model.state_dict(only_rank_0=False).items()]
    return "" if all(moved) else "not trained"


def attempt_all() -> dict[tuple[str, str], str]:
    return {(kind, name): attempt(kind, name) for kind in ("pickled", "plain", "boosted") for name in PLUGINS}


ADVICE = {
    ("pickled", "DDP"): "booster.save_model(model, checkpoint)",
    ("pickled", "FSDP"): "booster.save_model(model, checkpoint)",
    ("pickled", "Gemini"): "booster.save_model(model, checkpoint)",
    ("plain", "ZeRO-1"): "Update parameters by the boosted optimizer only",
    ("plain", "ZeRO-2"): "Update parameters by the boosted optimizer only",
    ("plain", "Gemini"): "Update parameters by the boosted optimizer only",
    ("boosted", "DDP"): "Boost a model once",
    ("boosted", "FSDP"): "Build a new one, and load a checkpoint into it",
    ("boosted", "ZeRO-1"): "Build a new model, and load a checkpoint into it",
    ("boosted", "ZeRO-2"): "Build a new model, and load a checkpoint into it",
    ("boosted", "Gemini"): "Wrap or boost it once",
}


def test_other_optimizers_and_pickles() -> None:
    for found in run_processes(attempt_all, 2):
        for case, message in found.items():
            advice = ADVICE.get(case, "")
            assert (advice in message) if advice else message == "", (case, message)
