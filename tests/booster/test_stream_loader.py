# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Loaders of streams: every sample once, on any number of ranks and workers, and resumed on any other."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import ConfigError, UnsupportedError
from colossal.interface import OptimizerWrapper
from colossal.testing import fake_world, run_processes


class Numbers(IterableDataset[int]):
    """Knows of workers, as streams of many files do, and has a new order in each epoch."""

    def __init__(self, size: int = 20) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        info = get_worker_info()
        return iter(order if info is None else order[info.id :: info.num_workers])


class Sized(Numbers):
    def __len__(self) -> int:
        return self.size


def read(size: int, batch: int, num_epochs: int = 2, state: Any = None, **options: Any) -> list[set[int]]:
    """What all ranks read together, batch by batch."""
    ranks = []
    for rank in range(size):
        with fake_world(size, rank=rank):
            loader: Any = TorchDDPPlugin().prepare_dataloader(Numbers(), batch, **options)
            if state is not None:
                loader.load_state_dict(state)
            ranks.append([each.tolist() for _ in range(num_epochs) for each in loader])
    return [set().union(*parts) for parts in zip(*ranks, strict=True)]


def expected(batch: int, *, drop_last: bool = False) -> list[set[int]]:
    """The same in one process, without a loader."""
    found = []
    for epoch in range(2):
        dataset = Numbers()
        dataset.set_epoch(epoch)
        order = list(dataset)
        found += [set(order[k : k + batch]) for k in range(0, len(order), batch)]
    return [each for each in found if len(each) == batch or not drop_last]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_of_all_ranks_do_not_depend_on_their_number(size: int, drop_last: bool) -> None:
    assert read(size, 8 // size, drop_last=drop_last) == expected(8, drop_last=drop_last)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_batches_do_not_depend_on_workers(options: dict[str, Any]) -> None:
    assert read(2, 2, num_workers=2, **options) == expected(4)


@pytest.mark.parametrize(
    ("num_read", "options"), [(k, {"drop_last": k % 2 == 0}) for k in range(6)] + [(1, {"num_workers": 1})]
)
def test_any_number_of_ranks_goes_on_with_the_samples_that_none_has_read(num_read: int, options: Any) -> None:
    with fake_world(2):
        loader: Any = TorchDDPPlugin().prepare_dataloader(Numbers(), 4, **options)
        batches = (batch for _ in range(2) for batch in loader)
        for _ in range(num_read):
            next(batches)
        state = loader.state_dict()
    drop_last = options.get("drop_last", False)
    rest = expected(8, drop_last=drop_last)[num_read:]
    for size in (1, 2, 4):
        assert read(size, 8 // size, state=state, drop_last=drop_last)[: len(rest)] == rest


def test_a_checkpoint_keeps_the_position(tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    model, *_ = booster.boost(torch.nn.Linear(1, 1))
    loader: Any = booster.plugin.prepare_dataloader(Numbers(), 8)
    rest = iter(loader)
    next(rest)
    booster.save(tmp_path, model, step=1, dataloader=loader)
    again: Any = booster.plugin.prepare_dataloader(Numbers(), 8)
    assert booster.load(tmp_path, model, dataloader=again) == 1
    left = [batch.tolist() for batch in rest]
    assert [batch.tolist() for batch in again] == left
    booster.save(tmp_path, model, step=2, dataloader=loader)
    shuffled = booster.plugin.prepare_dataloader(torch.arange(20), 8, shuffle=True)
    with pytest.raises(ConfigError, match="seed=None saved and seed=1024 here"):
        booster.load(tmp_path, model, dataloader=shuffled)


def test_an_iterator_that_was_only_looked_at_does_not_count() -> None:
    with fake_world(2):
        loader: Any = TorchDDPPlugin().prepare_dataloader(Numbers(), 4)
        optimizer = OptimizerWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        looked_at = next(iter(loader)).tolist()
        first = [(optimizer.step(), batch.tolist())[1] for batch in loader]
        second = [(optimizer.step(), batch.tolist())[1] for batch in loader]
    assert first[0] == looked_at
    assert [len(first), len(second)] == [3, 3]
    assert first != second


def test_a_length_is_that_of_the_stream() -> None:
    with fake_world(2):
        for drop_last, length in ((False, 3), (True, 2)):
            loader: Any = TorchDDPPlugin().prepare_dataloader(Sized(21), 4, drop_last=drop_last)
            assert len(loader) == length == len(list(loader))
        with pytest.raises(TypeError):
            len(TorchDDPPlugin().prepare_dataloader(Numbers(), 4))


def gather() -> list[list[int]]:
    """Metrics see each sample once."""
    booster = Booster(plugin=TorchDDPPlugin(), device="cpu")
    loader: Any = booster.plugin.prepare_dataloader(Numbers(7), 2)
    return [booster.gather_for_metrics(batch, loader).tolist() for batch in loader]


def compare() -> None:
    dataset = Numbers(7)
    assert [each for batch in gather() for each in batch] == list(dataset)
    with ParallelMesh(tp=2):
        plugin = HybridParallelPlugin(2, 1, precision="fp32")
        batches: Any = plugin.prepare_dataloader(dataset, 4)
        assert [each for batch in batches for each in batch.tolist()] == list(dataset)  # they share a replica


def test_metrics_see_each_sample_once_and_ranks_of_a_replica_see_the_same() -> None:
    run_processes(compare, 2)


def test_an_endless_stream_can_be_read() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    with fake_world(2):
        loader: Any = TorchDDPPlugin().prepare_dataloader(Endless(), 4)
        assert [len(batch) for batch in islice(loader, 5)] == [4] * 5


def test_what_a_stream_cannot_do_is_refused() -> None:
    prepare = Booster(device="cpu").plugin.prepare_dataloader
    with pytest.raises(UnsupportedError, match=r"shuffle=True for Numbers\. .* set_epoch"):
        prepare(Numbers(), 2, shuffle=True)
    with pytest.raises(UnsupportedError, match="distributed_sampler_cls=DistributedSampler"):
        prepare(Numbers(), 2, distributed_sampler_cls=DistributedSampler)
    split = Numbers()
    split._distributed = object()
    with pytest.raises(ConfigError, match="split_dataset_by_node"):
        prepare(split, 2)


def test_a_loader_of_another_class_is_warned_of_and_one_of_the_plugin_is_not(capfd: Any) -> None:
    with fake_world(2):
        plugin = TorchDDPPlugin()
        booster = Booster(plugin=plugin, device="cpu")
        for loader, is_warned in ((plugin.prepare_dataloader(Numbers(), 2), False), (DataLoader(Numbers(), 2), True)):
            booster.boost(torch.nn.Linear(1, 1), dataloader=loader)
            output = "".join(capfd.readouterr())
            assert ("Numbers must yield other samples on each data-parallel rank" in output) is is_warned
