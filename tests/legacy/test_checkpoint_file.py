"""One file of the older API goes from strategy to strategy, and training goes on as in one process."""

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import CheckpointError, ConfigError
from colossal.legacy.utils import load_checkpoint, save_checkpoint
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.nn.optimizer import HybridAdam
from colossal.testing import WorldError, run_processes

STRATEGIES: dict[str, Callable[[], Plugin | None]] = {
    "data": TorchDDPPlugin,
    "tensor": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"),
    "pipeline": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32"),
    "ZeRO": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
}
NAME = "llama-tied"


def start(plugin: Plugin | None, seed: int) -> tuple[Booster, Any]:
    torch.manual_seed(seed)  # other values than those that are loaded
    model = build(NAME)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=len(STRATEGIES), warmup_steps=1)
    booster = Booster(device="cpu", plugin=plugin)
    return booster, booster.boost(model, optimizer, lambda outputs, _=None: outputs.loss, None, schedule)


def take_step(booster: Booster, boosted: Any, step: int) -> None:
    model, optimizer, criterion, _, schedule = boosted
    rank, size = (0, 1) if booster.plugin is None else booster.plugin.data_parallel_rank_and_size()
    pairs = [inputs_of(NAME, num_changed=each) for each in (step, step + 4)]
    batch = {key: torch.cat([pair[key] for pair in pairs]).chunk(size)[rank] for key in pairs[0]}
    with KeepFloat64():
        if isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1:
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        else:
            booster.backward(criterion(model(**batch)), optimizer)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def train_from_strategy_to_strategy(folder: Path) -> list[int]:
    """Take a step under each strategy, from the file that the one before saved."""
    epochs = []
    for number, strategy in enumerate(STRATEGIES):
        booster, boosted = start(STRATEGIES[strategy](), seed=number)
        model, optimizer, _, _, schedule = boosted
        if number:
            epochs.append(load_checkpoint(folder / f"{number - 1}.pt", model, optimizer, schedule))
        take_step(booster, boosted, number)
        save_checkpoint(folder / f"{number}.pt", number, model, optimizer, schedule)
    return epochs


def reference() -> tuple[nn.Module, torch.optim.Optimizer]:
    booster, boosted = start(None, seed=0)
    for number in range(len(STRATEGIES)):
        take_step(booster, boosted, number)
    return boosted[0].unwrap(), boosted[1].unwrap()


def test_training_goes_on_from_strategy_to_strategy_as_in_one_process(tmp_path: Path) -> None:
    assert run_processes(train_from_strategy_to_strategy, 2, tmp_path) == [[0, 1, 2]] * 2
    model, expected_optimizer = reference()
    torch.manual_seed(9)
    fresh = build(NAME)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=len(STRATEGIES), warmup_steps=1)
    assert load_checkpoint(tmp_path / "3.pt", fresh, optimizer, schedule) == 3
    assert schedule.last_epoch == len(STRATEGIES)
    for (name, expected), parameter in zip(model.named_parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, msg=name)
    for expected, parameter in zip(model.parameters(), fresh.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.state[parameter][key], expected_optimizer.state[expected][key])
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{number}.pt" for number in range(4)]


def test_the_file_is_the_documented_dictionary_of_full_tensors(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "new" / "epoch.pt", 7, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
    content = torch.load(tmp_path / "new" / "epoch.pt", weights_only=True)
    assert list(content) == ["epoch", "model", "optimizer", "lr_scheduler"]
    assert content["epoch"] == 7
    fresh = nn.Linear(3, 2)
    fresh.load_state_dict(content["model"])
    assert torch.equal(fresh.weight, model.weight)
    assert content["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert torch.equal(content["optimizer"]["state"]["weight"]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def save_under_gemini(path: Path) -> None:
    plugin = GeminiPlugin(precision="bf16", min_chunk_size_m=0.001, search_range_m=0.001)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model, optimizer, *_ = Booster(device="cpu", plugin=plugin).boost(model, HybridAdam(model.parameters()))
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    save_checkpoint(path, 1, model, optimizer)
    before = model.state_dict(only_rank_0=False)
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    assert load_checkpoint(path, model, optimizer) == 1
    after = model.state_dict(only_rank_0=False)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_chunks_of_gemini_are_saved_and_loaded(tmp_path: Path) -> None:
    run_processes(save_under_gemini, 2, tmp_path / "gemini.pt")
    fresh = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).bfloat16()
    assert load_checkpoint(tmp_path / "gemini.pt", fresh) == 1


def test_loads_what_torch_saved_with_the_same_names(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"epoch": 2, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "older.pt")
    fresh = nn.Linear(3, 2)
    other = torch.optim.SGD(fresh.parameters(), lr=0.7, momentum=0.9)
    assert load_checkpoint(tmp_path / "older.pt", fresh, other) == 2
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(other.state[fresh.bias]["momentum_buffer"], optimizer.state[model.bias]["momentum_buffer"])
    assert other.param_groups[0]["lr"] == 0.1


class Payload:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_no_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": 1, "model": {}, "payload": Payload()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "bad.pt", nn.Linear(1, 1))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {}}, "without epoch"),
        ({"epoch": 1}, "without model"),
        ({"epoch": 1, "model": 3}, "a dict under the name 'model'"),
        ({"epoch": 1, "model": {"other": torch.ones(1)}}, "only other names, such as 'other'"),
    ],
)
def test_refuses_a_file_that_is_none_of_the_model(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "file.pt", nn.Linear(1, 1))


def test_says_what_is_missing(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match="Found none at"):
        load_checkpoint(tmp_path / "none.pt", model)
    save_checkpoint(tmp_path / "model.pt", 0, model)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(CheckpointError, match="without optimizer, lr_scheduler"):
        load_checkpoint(tmp_path / "model.pt", model, optimizer, schedule)


def test_not_strict_loads_the_names_that_agree(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model.pt", 4, nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="missing"):
        load_checkpoint(tmp_path / "model.pt", model)
    assert load_checkpoint(tmp_path / "model.pt", model, strict=False) == 4


def test_a_failed_save_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "model.pt", 1, model)
    before = (tmp_path / "model.pt").read_bytes()
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters()), lambda step: step)
    schedule.last_epoch = io.StringIO()  # type: ignore[assignment] # no plain data
    with pytest.raises(CheckpointError, match="plain data"):
        save_checkpoint(tmp_path / "model.pt", 2, model, lr_scheduler=schedule)
    assert (tmp_path / "model.pt").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]


def load_into_stages(folder: Path) -> None:
    with ParallelMesh(pp=2) as mesh:
        stage = mesh.rank("pp")
        full = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        for number, parameter in enumerate(full.parameters()):
            nn.init.constant_(parameter, number)
        save_checkpoint(folder / "full.pt", 4, full)
        part = nn.Sequential(*(layer if at == stage else nn.Identity() for at, layer in enumerate(copy.deepcopy(full))))
        for parameter in part.parameters():
            nn.init.zeros_(parameter)
        assert load_checkpoint(folder / "full.pt", part) == 4
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, full.get_parameter(name)), name
        with pytest.raises(CheckpointError, match="have the names of the file together"):
            load_checkpoint(folder / "full.pt", nn.Sequential(nn.Identity(), part[stage]) if stage == 1 else nn.ReLU())
        own = nn.Linear(2, 2)
        nn.init.constant_(own.weight, stage)
        with pytest.raises(ConfigError, match="the model of the engine"):
            save_checkpoint(folder / "stage.pt", 0, own)
        with pytest.raises(ConfigError, match="pp=2"):
            load_checkpoint(folder / "full.pt", own, strict=False)
        with pytest.raises(ConfigError, match="pp=2"):
            load_checkpoint(folder / "full.pt", part, torch.optim.SGD(part.parameters()))


def test_a_full_model_is_loaded_into_the_modules_of_stages_with_its_names(tmp_path: Path) -> None:
    run_processes(load_into_stages, 2, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["full.pt"]


def save_optimizer_itself(path: Path, pipeline: bool) -> None:
    plugin = STRATEGIES["pipeline"]() if pipeline else STRATEGIES["ZeRO"]()
    _, (model, optimizer, *_) = start(plugin, seed=0)
    save_checkpoint(path, 0, model, optimizer.unwrap())


@pytest.mark.parametrize(("pipeline", "found"), [(True, "one pipeline stage"), (False, "the model does not have")])
def test_refuses_an_optimizer_that_knows_shards_only(tmp_path: Path, pipeline: bool, found: str) -> None:
    with pytest.raises((WorldError, ConfigError), match=found):
        run_processes(save_optimizer_itself, 2, tmp_path / "file.pt", pipeline)
    assert not list(tmp_path.iterdir())
