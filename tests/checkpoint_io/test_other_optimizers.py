# pyright: reportArgumentType=false
"""Sharded optimizer checkpoints in PyTorch's format, with a file of groups that is a list, go into any optimizer."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import crossed
from equality import assert_equal
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler

from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.checkpoint_io import CheckpointIO
from colossal.errors import CheckpointError
from colossal.nn.optimizer import HybridAdam
from colossal.testing import run_processes

IO = CheckpointIO()
STEPS = 3
PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "hybrid zero": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, precision="fp32"),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda groups: AdamW(groups, lr=0.05),
    "hybrid": lambda groups: HybridAdam(groups, lr=0.05),
    "sgd": lambda groups: SGD(groups, lr=0.05, momentum=0.9),
}


def build(seed: int = 0, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 2))
    return nn.Sequential(*layers).double()  # Adam makes steps of the rounding of tiny gradients in float32


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    by_dim = [[each for each in model.parameters() if each.dim() == dim] for dim in (2, 1)]
    return [{"params": by_dim[0], "weight_decay": 0.1}, {"params": by_dim[1], "weight_decay": 0.0}]


def step(booster: Booster, model: Any, optimizer: Any, times: int) -> None:
    """All ranks read the same batch, so that one process takes the same steps."""
    for seed in range(times):
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        booster.backward(model(torch.randn(8, 4, generator=generator, dtype=torch.float64)).square().mean(), optimizer)
        optimizer.step()


def trained(kind: str) -> tuple[nn.Module, Any]:
    booster, model = Booster(device="cpu"), build()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    step(booster, boosted, wrapped, STEPS)
    return model, optimizer


def write(folder: Path, state: dict[str, Any], num_shards: int = 3, in_dict: bool = False, **changes: Any) -> None:
    """Write a state dict as an index, shards by position, and a pickled list of groups."""
    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        name = f"pytorch_optim-{number + 1:05d}.bin"
        part = {id_: value for id_, value in state["state"].items() if id_ % num_shards == number}
        weight_map |= {str(id_): name for id_ in part}
        torch.save(part, folder / name)
    groups = [group | changes for group in state["param_groups"]]
    torch.save({"param_groups": groups} if in_dict else groups, folder / "pytorch_optim_group.bin")
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin", "total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_optim.bin.index.json").write_text(json.dumps(index))


def go_on(plugin: str | None, kind: str, folder: Path, model: nn.Module) -> dict[str, Any]:
    """Load, and return the whole state as a file of ours says it, and the parameters some steps later."""
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]() if plugin else None)
    fresh = build()
    fresh.load_state_dict(model.state_dict())
    optimizer = OPTIMIZERS[kind](groups_of(fresh))
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    boosted, wrapped, *_ = booster.boost(fresh, optimizer)
    booster.load_optimizer(wrapped, folder)
    booster.save_optimizer(wrapped, folder.parent / "ours")
    lrs = [group["lr"] for group in wrapped.param_groups]
    step(booster, boosted, wrapped, 2)
    return {"lrs": lrs, "after": boosted.state_dict(only_rank_0=False)}


@pytest.mark.chosen
@pytest.mark.parametrize(("plugin", "kind"), crossed([None, *PLUGINS], OPTIMIZERS, one_in=2))
def test_it_loads_under_every_plugin(plugin: str | None, kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    state = optimizer.state_dict()
    if kind == "hybrid":  # some count in plain numbers
        state["state"] = {id_: entry | {"step": int(entry["step"])} for id_, entry in state["state"].items()}
    write(tmp_path / "theirs", state)
    arguments = (plugin, kind, tmp_path / "theirs", model)
    ranks = [go_on(*arguments)] if plugin is None else run_processes(go_on, 2, *arguments)
    assert_same_state(tmp_path / "ours", optimizer, kind)
    booster = Booster(device="cpu")
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    step(booster, boosted, wrapped, 2)
    for rank in ranks:
        assert rank["lrs"] == [0.05, 0.05]
        for name, value in model.state_dict().items():
            assert_equal(rank["after"][name], value, name)


def assert_same_state(path: Path, optimizer: Any, kind: str) -> None:
    model = build()
    again = OPTIMIZERS[kind](groups_of(model))
    _, wrapped, *_ = Booster(device="cpu").boost(model, again)  # which knows the names that our file has
    IO.load_optimizer(wrapped, path)
    found, expected = again.state_dict(), optimizer.state_dict()
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.1, 0.0]
    assert found["state"].keys() == expected["state"].keys() == set(range(6))
    for id_, entry in expected["state"].items():
        assert found["state"][id_].keys() == entry.keys()
        assert all(torch.equal(torch.as_tensor(found["state"][id_][key]), value) for key, value in entry.items())


def test_the_index_itself_and_groups_in_a_dict_load_too(tmp_path: Path) -> None:
    model, optimizer = trained("adamw")
    write(tmp_path / "theirs", optimizer.state_dict(), num_shards=1, in_dict=True)
    again = AdamW(groups_of(build()), lr=1.0)
    IO.load_optimizer(again, tmp_path / "theirs" / "pytorch_optim.bin.index.json")
    assert model[0].weight.shape == again.state_dict()["state"][0]["exp_avg"].shape
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(again.state_dict()["state"][0][key], optimizer.state_dict()["state"][0][key])


def test_hyperparameters_that_a_file_does_not_know_stay(tmp_path: Path) -> None:
    _, optimizer = trained("adamw")
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["amsgrad"], group["foreach"]
    write(tmp_path / "theirs", state, theirs_alone=True)
    again = AdamW(groups_of(build()), lr=1.0, amsgrad=True, foreach=False)
    IO.load_optimizer(again, tmp_path / "theirs")
    found = [(group["amsgrad"], group["foreach"], group["lr"]) for group in again.param_groups]
    assert found == [(True, False, 0.05)] * 2


@pytest.mark.parametrize("groups", [True, False])
def test_an_optimizer_of_another_model_is_refused(groups: bool, tmp_path: Path) -> None:
    _, optimizer = trained("adamw")
    write(tmp_path / "theirs", optimizer.state_dict())
    wider = build(width=9)
    again = AdamW(groups_of(wider) if groups else wider.parameters())
    with pytest.raises(
        CheckpointError,
        match=r"other shapes for 3 of them: 0 \(file \[6, 4\], model \[9, 4\]\)" if groups else "for 5 of them",
    ):
        IO.load_optimizer(again, tmp_path / "theirs")
    assert not again.state


class Harm:
    """What a file says when its author wants a command to be run by whoever loads it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder / "harmed"),)


@pytest.mark.parametrize("where", ["groups", "shard", "group of a dict"])
def test_a_pickle_that_wants_to_run_something_is_refused_and_does_not(where: str, tmp_path: Path) -> None:
    _, optimizer = trained("adamw")
    state = optimizer.state_dict()
    state["param_groups"][0] |= {} if where == "shard" else {"lr": Harm(tmp_path)}
    state["state"][0] |= {"exp_avg": Harm(tmp_path)} if where == "shard" else {}
    write(tmp_path / "theirs", state, in_dict=where == "group of a dict")
    again = AdamW(groups_of(build()))
    with pytest.raises(CheckpointError, match="cannot be read"):
        IO.load_optimizer(again, tmp_path / "theirs")
    assert not (tmp_path / "harmed").exists()
    assert not again.state
    file = "pytorch_optim-00001.bin" if where == "shard" else "pytorch_optim_group.bin"
    torch.load(tmp_path / "theirs" / file, weights_only=False)
    assert (tmp_path / "harmed").exists(), "the file does no harm anyway"


def test_a_list_is_refused_where_no_groups_belong(tmp_path: Path) -> None:
    torch.save([{"params": [0]}], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="must hold a dict. Found a list"):
        IO.load_model(build(), tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="must hold a dict. Found a list"):
        IO.load_optimizer(SGD(build().parameters()), tmp_path / "list.bin")
    _, optimizer = trained("adamw")
    write(tmp_path / "theirs", optimizer.state_dict())
    torch.save([], tmp_path / "theirs" / "pytorch_optim-00001.bin")
    with pytest.raises(CheckpointError, match="must hold a dict. Found a list"):
        IO.load_optimizer(AdamW(groups_of(build())), tmp_path / "theirs")


def test_a_schedule_that_torch_saved_loads_and_another_kind_is_refused(tmp_path: Path) -> None:
    optimizer = SGD(build().parameters(), lr=1.0)
    schedule = lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    torch.save(schedule.state_dict(), tmp_path / "lr_scheduler.bin")
    again = lr_scheduler.StepLR(SGD(build().parameters(), lr=1.0), step_size=7)
    IO.load_lr_scheduler(again, tmp_path / "lr_scheduler.bin")
    assert again.state_dict() == schedule.state_dict()
    with pytest.raises(CheckpointError, match="file of a CosineAnnealingLR"):
        IO.load_lr_scheduler(lr_scheduler.CosineAnnealingLR(optimizer, T_max=3), tmp_path / "lr_scheduler.bin")
    torch.save({"step_size": Harm(tmp_path)}, tmp_path / "harm.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        IO.load_lr_scheduler(again, tmp_path / "harm.bin")
    assert not (tmp_path / "harmed").exists()
