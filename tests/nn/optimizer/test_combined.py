# pyright: reportArgumentType=false, reportCallIssue=false
"""Several optimizers of one model, as one: equal to one process, or refused as each of them is."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import assert_equal
from families import build
from float64 import KeepFloat64
from plugins import plugins
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from colossal.booster import Booster
from colossal.errors import ConfigError, UnsupportedError
from colossal.nn.optimizer import CombinedOptimizer
from colossal.testing import fake_world, run_processes

PLUGINS = plugins("DDP", "pp2", "Hybrid", "FSDP", "ZeRO-1", "ZeRO-2", "Gemini", "tp2", "Gemini, tp2")
WHOLE_MATRICES = ("DDP", "pp2", "Hybrid")
IDS = (torch.arange(48) * 7 % 31).view(2, 4, 6)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [each for name, each in model.named_parameters() if each.dim() == 2 and "layers" in name]
    return matrices, [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]


def muon_and_adamw(model: nn.Module) -> CombinedOptimizer:
    matrices, others = split(model)
    return CombinedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, eps=1e-4))


def sgd_and_adamw(model: nn.Module) -> CombinedOptimizer:
    matrices, others = split(model)
    return CombinedOptimizer(
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01, eps=1e-4)
    )


def train(booster: Any, model: Any, optimizer: Any, schedule: Any, steps: range) -> None:
    for step in steps:
        batch = {"input_ids": IDS[step % 2], "labels": IDS[step % 2]}
        if booster is None:
            model(**batch).loss.backward()
        else:
            if booster.plugin.data_parallel_rank_and_size()[1] == 2:
                batch = {name: value.chunk(2)[dist.get_rank()] for name, value in batch.items()}
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def boosted(plugin: str, make: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any]:
    booster, model = Booster(device="cpu", plugin=PLUGINS[plugin](), max_norm=0.5), build("llama").double()
    model, optimizer, *_ = booster.boost(model, make(model))
    return booster, model, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)


def resume(plugin: str, make: Callable[[Any], Any], folder: str) -> None:
    parts = booster, model, optimizer, schedule = boosted(plugin, make)
    train(*parts, range(2))
    booster.save(f"{folder}/run", model, optimizer, schedule, step=2)
    parts = booster, model, optimizer, schedule = boosted(plugin, make)
    assert booster.load(f"{folder}/run", model, optimizer, schedule) == 2
    train(*parts, range(2, 4))
    booster.save_model(model, f"{folder}/end", shard=True, use_safetensors=False)


def run_all(cases: list[tuple[str, Any]], folder: str) -> None:
    with KeepFloat64():
        for plugin, make in cases:
            resume(plugin, make, f"{folder}/{plugin}-{make.__name__}")


FAST = [("pp2", muon_and_adamw), ("ZeRO-1", sgd_and_adamw)]
OTHERS = [
    ("DDP", muon_and_adamw),
    ("Hybrid", muon_and_adamw),
    *((plugin, sgd_and_adamw) for plugin in PLUGINS if plugin != "ZeRO-1"),
]


@pytest.mark.parametrize("cases", [FAST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_a_step_is_one_of_each(cases: list[tuple[str, Any]], tmp_path: Path) -> None:
    """With clipping, a schedule of the boosted optimizer, and a checkpoint."""
    run_processes(run_all, 2, cases, str(tmp_path))
    for make in (muon_and_adamw, sgd_and_adamw):
        model = build("llama").double()
        matrices, others = make(model).optimizers  # apart, as without the class
        schedules = [LambdaLR(each, lambda step: 0.5**step) for each in (matrices, others)]
        with KeepFloat64():
            for step in range(4):
                model(input_ids=IDS[step % 2], labels=IDS[step % 2]).loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                for each in (matrices, others, *schedules):
                    each.step()
                model.zero_grad()
        for plugin in (plugin for plugin, other in cases if other is make):
            state: dict[str, torch.Tensor] = {}
            for file in sorted((tmp_path / f"{plugin}-{make.__name__}" / "end").glob("*.bin")):
                state |= torch.load(file)
            for name, value in model.state_dict().items():
                assert_equal(state[name], value, f"{plugin}, {make.__name__}, {name}")


@pytest.mark.parametrize("plugin", [plugin for plugin in PLUGINS if plugin not in WHOLE_MATRICES])
def test_muon_is_refused_where_matrices_are_sharded(plugin: str) -> None:
    with fake_world(2), pytest.raises(UnsupportedError, match="Muon"):
        boosted(plugin, muon_and_adamw)


def test_two_optimizers_name_the_class_that_combines_them() -> None:
    model, booster = nn.Linear(4, 4), Booster(device="cpu")
    muon, adamw = torch.optim.Muon([model.weight]), torch.optim.AdamW([model.bias])
    for both in ([muon, adamw], (muon, adamw)):
        with pytest.raises(ConfigError, match=r"Found 2: Muon, AdamW.*CombinedOptimizer\(\*optimizers\)"):
            booster.boost(model, both)
    boosted_model, *_ = booster.boost(model, muon)
    with pytest.raises(ConfigError, match="CombinedOptimizer"):
        booster.boost(boosted_model, adamw)
    with pytest.raises(ConfigError, match="Found 1 in several"):
        CombinedOptimizer(muon, torch.optim.SGD(model.parameters(), lr=0.1))
    for wrong in ((), (muon, "adamw")):
        with pytest.raises(ConfigError, match="built of optimizers"):
            CombinedOptimizer(*wrong)
    with pytest.raises(ConfigError, match="before they are combined"):
        CombinedOptimizer(muon).add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_copies_and_loaded_states_are_those_of_each() -> None:
    model = nn.Linear(4, 4)
    optimizer = CombinedOptimizer(torch.optim.Muon([model.weight]), torch.optim.AdamW([model.bias]))
    assert optimizer.step(lambda: model(torch.ones(2, 4)).sum()) is not None
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    other, copied = nn.Linear(4, 4), copy.deepcopy(optimizer)
    new = CombinedOptimizer(torch.optim.Muon([other.weight]), torch.optim.AdamW([other.bias]))
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch takes the tensors as they are
    other.load_state_dict(model.state_dict())
    for each, weight in ((new, other.weight), (copied, copied.param_groups[0]["params"][0])):
        assert all(one.state is each.state for one in each.optimizers)
        assert torch.equal(each.state[weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])
    for each in (model, other):
        each.zero_grad()
        each(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    new.step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
