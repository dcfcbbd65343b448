# pyright: reportArgumentType=false
"""What a loader must divide, what files are called, and what compiled models are saved as."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import plugins
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError
from colossal.testing import fake_world, run_processes

DATA = TensorDataset(torch.arange(8.0))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


def sampled(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0, **options))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("plugin", [TorchDDPPlugin, LowLevelZeroPlugin, GeminiPlugin])
def test_a_loader_of_the_whole_dataset_is_refused_on_several_ranks(plugin: Callable[[], Any], shuffle: bool) -> None:
    loader = DataLoader(DATA, batch_size=2, shuffle=shuffle)
    with fake_world(2), pytest.raises(ConfigError, match=r"Each of 2 data-parallel ranks.*prepare_dataloader"):
        Booster(device="cpu", plugin=plugin()).boost(nn.Linear(1, 1), dataloader=loader)


def test_a_batch_sampler_does_not_hide_a_sampler_of_the_whole_dataset() -> None:
    loader = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, drop_last=False))
    with fake_world(2), pytest.raises(ConfigError, match="SequentialSampler"):
        Booster(device="cpu", plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1), dataloader=loader)


def test_a_sampler_of_another_number_of_ranks_is_refused() -> None:
    hybrid = partial(HybridParallelPlugin, 1, 2, num_microbatches=1, precision="fp32")
    cases = [(3, {}, TorchDDPPlugin), (2, {"pp": 2}, hybrid)]  # ranks that split a model read the same samples
    for size, mesh, plugin in cases:
        batches = BatchSampler(DistributedSampler(DATA, 2, 0), 2, drop_last=False)
        for loader in (sampled(), DataLoader(DATA, batch_sampler=batches)):
            with fake_world(size), ParallelMesh(**mesh), pytest.raises(ConfigError, match="Found a DistributedSampler"):
                Booster(device="cpu", plugin=plugin()).boost(nn.Linear(1, 1), dataloader=loader)


def test_a_sampler_of_another_rank_is_refused() -> None:
    found = r"this is 0 of 2; .* Found a DistributedSampler with rank=1 and num_replicas=2\. Build the loader by plugin"
    loader = DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 1))
    with fake_world(2), pytest.raises(ConfigError, match=found):
        Booster(device="cpu", plugin=TorchDDPPlugin()).boost(nn.Linear(1, 1), dataloader=loader)


@pytest.mark.parametrize("sampler", [WeightedRandomSampler([1.0] * 8, 8), SubsetRandomSampler(range(4))])
def test_samplers_that_may_draw_the_same_on_all_ranks_are_warned_of(sampler: Any, capfd: Any) -> None:
    for size in (1, 2):
        with fake_world(size):
            booster = Booster(device="cpu", plugin=TorchDDPPlugin())
            booster.boost(nn.Linear(1, 1), dataloader=DataLoader(DATA, sampler=sampler))
        found = f"{type(sampler).__name__} must draw other samples on each" in "".join(capfd.readouterr())
        assert found is (size > 1)


def test_loaders_that_divide_or_may_divide_are_accepted() -> None:
    with fake_world(2):
        plugin = TorchDDPPlugin()
        booster = Booster(device="cpu", plugin=plugin)
        by_rank, divided = [[0, 1], [4, 5]], BatchSampler(DistributedSampler(DATA, 2, 0), 2, drop_last=False)
        own = (DataLoader(DATA, batch_sampler=by_rank), DataLoader(DATA, batch_sampler=divided))
        for loader in (
            *own,
            sampled(),
            DataLoader(DATA, None, sampler=[0, 2]),
            DataLoader(Stream()),
            plugin.prepare_dataloader(DATA, 2),
            None,
        ):
            assert booster.boost(nn.Linear(1, 1), dataloader=loader)[3] is loader


def test_where_all_ranks_see_the_same_any_loader_is_right() -> None:
    loader = DataLoader(DATA, batch_size=2)
    assert Booster(device="cpu").boost(nn.Linear(1, 1), dataloader=loader)[3] is loader
    with fake_world(2), ParallelMesh(pp=2):
        booster = Booster(device="cpu", plugin=HybridParallelPlugin(1, 2, num_microbatches=1, precision="fp32"))
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        assert booster.boost(model, dataloader=loader)[3] is loader


# ------------------------------------------------------------------------------------------------------- file names


def test_a_file_is_what_its_name_says(tmp_path: Path) -> None:
    booster, model = Booster(device="cpu"), nn.Linear(2, 1)
    booster.save_model(model, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)
    other = booster.load_model(nn.Linear(2, 1), tmp_path / "model.safetensors")
    assert torch.equal(other.weight, model.weight)


def test_a_file_of_torch_under_another_name_is_read_by_its_content(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    torch.save(model.state_dict(), tmp_path / "model.safetensors")
    other = Booster(device="cpu").load_model(nn.Linear(2, 1), tmp_path / "model.safetensors")
    assert torch.equal(other.weight, model.weight)


# -------------------------------------------------------------------------------------------------- compiled models


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def compiled_inside() -> nn.Module:
    model = plain()
    model[0] = torch.compile(model[0], backend="eager")
    return model


COMPILED: dict[str, Callable[[], Any]] = {
    "all": lambda: torch.compile(plain(), backend="eager"),
    "a layer": compiled_inside,
}
PLUGINS = plugins("none", "DDP") | {"ZeRO": plugins("ZeRO-1")["ZeRO-1"]}


def train(model: Any, plugin: str, folder: Path | None, source: Path | None = None) -> list[torch.Tensor]:
    """Train, or go on; and return the parameters."""
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    if source is not None:
        booster.load_model(model, source / "model.safetensors")
        booster.load_optimizer(optimizer, source / "optimizer")
    booster.backward(model(torch.ones(4, 2)).square().sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if folder is not None:
        booster.save_model(model, folder / "model.safetensors")
        booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    return [parameter.detach().clone() for parameter in model.unwrap().parameters()]


def go_on_without_compiling(kind: str, plugin: str, folder: str) -> None:
    results = []
    for make in (plain, COMPILED[kind]):
        torch.manual_seed(0)
        place = Path(folder) / make.__name__.strip("<>")
        place.mkdir(exist_ok=True)
        train(make(), plugin, place)
        results.append(train(plain(), plugin, None, place))
        assert sorted(load_file(place / "model.safetensors")) == sorted(plain().state_dict())
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_model_is_saved_under_the_names_of_the_plain_one(kind: str, plugin: str, tmp_path: Path) -> None:
    run_processes(go_on_without_compiling, 1 if plugin == "none" else 2, kind, plugin, str(tmp_path))
