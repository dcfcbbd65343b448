# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.errors import CheckpointError, ConfigError
from colossal.interface import OptimizerWrapper
from colossal.logging import DistributedLogger
from colossal.testing import fake_world


def epochs_of(
    rank: int, size: int, batch: int, num_epochs: int = 2, samples: int = 24, **options: Any
) -> list[list[list[int]]]:
    with fake_world(size, rank=rank):
        loader = TorchDDPPlugin().prepare_dataloader(torch.arange(samples), batch, **options)
        return [[b.tolist() for b in loader] for _ in range(num_epochs)]


def joined(size: int, batch: int, **options: Any) -> list[list[set[int]]]:
    ranks = [epochs_of(rank, size, batch, **options) for rank in range(size)]
    return [
        [set().union(*(rank[epoch][k] for rank in ranks)) for k in range(len(ranks[0][epoch]))]
        for epoch in range(len(ranks[0]))
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_all_ranks_together_do_not_depend_on_their_number(shuffle) -> None:
    expected = joined(1, 8, shuffle=shuffle)
    for size in (2, 4):
        assert joined(size, 8 // size, shuffle=shuffle) == expected
    assert set().union(*expected[0]) == set(range(24))


def test_each_epoch_has_a_new_order_and_a_seed_repeats_it() -> None:
    first, second = epochs_of(0, 2, 4, shuffle=True)
    assert first != second
    assert epochs_of(0, 2, 4, shuffle=True) == [first, second]
    assert epochs_of(0, 2, 4, shuffle=True, seed=5)[0] != first


def test_a_run_resumes_in_the_epoch_that_it_names() -> None:
    _, second = epochs_of(0, 2, 4, shuffle=True)
    with fake_world(2):
        loader = TorchDDPPlugin().prepare_dataloader(torch.arange(24), 4, shuffle=True)
        loader.sampler.set_epoch(1)
        assert [b.tolist() for b in loader] == second


def test_samples_that_do_not_divide_are_repeated_or_left_out() -> None:
    repeated = [epochs_of(rank, 2, 2, 1, samples=5)[0] for rank in range(2)]
    assert repeated == [[[0, 2], [4]], [[1, 3], [0]]]
    left_out = [epochs_of(rank, 2, 2, 1, samples=5, drop_last=True)[0] for rank in range(2)]
    assert left_out == [[[0, 2]], [[1, 3]]]


def test_without_a_plugin_one_process_sees_everything() -> None:
    loader = Booster(device="cpu").plugin.prepare_dataloader(torch.arange(5), 2)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4]]


class Rolls(Dataset):
    """What the random generators of a worker say."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: S311, NPY002


def test_workers_and_ranks_draw_different_random_numbers() -> None:
    rolls = []
    for rank in (0, 1, 1):
        with fake_world(2, rank=rank):
            loader = TorchDDPPlugin().prepare_dataloader(Rolls(), 1, num_workers=1)
            rolls.append(torch.cat(list(loader)))
    assert torch.equal(rolls[1], rolls[2])
    assert (rolls[0] != rolls[1]).all()


class Integers(Rolls):
    """What the generators of a worker draw, as the 32 bits that they have in common."""

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.getrandbits(32), np.random.randint(1 << 32), torch.randint(1 << 32, ()).item()]  # noqa: NPY002
        return torch.tensor(drawn)


def test_generators_of_a_worker_draw_different_numbers() -> None:
    with fake_world(2):
        drawn = torch.cat(list(TorchDDPPlugin().prepare_dataloader(Integers(), 1, num_workers=1)))
    assert len(drawn.unique()) == drawn.numel()


def test_workers_of_a_resumed_run_draw_what_those_of_the_uninterrupted_one_draw() -> None:
    with fake_world(2):
        loader, other = (TorchDDPPlugin().prepare_dataloader(Rolls(), 1, num_workers=1) for _ in range(2))
        first, position, second = torch.cat(list(loader)), loader.state_dict(), torch.cat(list(loader))
        other.load_state_dict(position)
        assert torch.equal(torch.cat(list(other)), second)
    assert (first != second).all()


def read_on_two_ranks(read: Callable[[Any, int, Any], list[Any]], **options: Any) -> list[list[list[int]]]:
    """Let a program read on each of two ranks; return what both read in each epoch."""
    ranks = []
    for rank in range(2):
        with fake_world(2, rank=rank):
            loader = TorchDDPPlugin().prepare_dataloader(torch.arange(24), 4, shuffle=True, **options)
            optimizer = OptimizerWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
            ranks.append(read(loader, rank, optimizer))
    return [sorted(first + second) for first, second in zip(*ranks, strict=True)]


def peek_before(loader: Any, rank: int, optimizer: Any) -> list[Any]:
    if rank == 0:
        next(iter(loader))
    epochs = []
    for _ in range(2):
        epochs.append([each for batch in loader for each in (optimizer.step(), batch.tolist())[1]])
        if rank == 0:
            next(iter(loader))
            next(iter(loader))
    return epochs


def peek_within(loader: Any, rank: int, optimizer: Any) -> list[Any]:
    epochs: list[Any] = []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch.tolist()
            optimizer.step()
            if rank == 0 and len(epochs[-1]) == 8:
                next(iter(loader))
    return epochs


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("read", [peek_before, peek_within])
def test_what_one_rank_looks_at_does_not_shift_later_epochs(read, options) -> None:
    if options.get("persistent_workers") and read is peek_within:
        pytest.skip("torch: an iterator of persistent workers ends with the next one")
    assert read_on_two_ranks(read, **options) == [list(range(24))] * 2


def test_epochs_that_are_left_early_have_new_orders() -> None:
    with fake_world(2):
        loader = TorchDDPPlugin().prepare_dataloader(torch.arange(24), 4, shuffle=True)
        optimizer = OptimizerWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        firsts = [(next(iter(loader)).tolist(), optimizer.step())[0] for _ in range(3)]
    assert len({tuple(each) for each in firsts}) == 3


def test_set_epoch_after_resuming_goes_on_in_that_epoch_and_begins_others() -> None:
    with fake_world(1):
        plugin = TorchDDPPlugin()
        loader = plugin.prepare_dataloader(torch.arange(16), 4, shuffle=True)
        epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
        for epoch, num_read in ((1, 1), (0, 0), (2, 0)):
            for is_looked_at in (False, True):
                loader = plugin.prepare_dataloader(torch.arange(16), 4, shuffle=True)
                loader.load_state_dict({"epoch": 1, "samples": 4})
                if is_looked_at:
                    next(iter(loader))
                loader.sampler.set_epoch(epoch)
                assert [batch.tolist() for batch in loader] == epochs[epoch][num_read:]


@pytest.mark.parametrize(
    ("dataset", "batch", "options", "error", "message"),
    [
        (range(4), 0, {}, ConfigError, "Found batch_size=0"),
        (range(4), None, {}, ConfigError, "Found batch_size=None"),
        (range(4), 2.0, {}, ConfigError, "Found batch_size=2.0"),
        (Dataset(), 2, {}, ConfigError, "Found Dataset without __len__"),
        (range(4), 2, {"sampler": None}, ConfigError, "Found sampler"),
        (range(4), 2, {"generator": torch.Generator()}, ConfigError, "Pass seed=generator.initial_seed"),
        (range(0), 2, {"shuffle": True}, ConfigError, "Found an empty range"),
        (range(3), 4, {"drop_last": True}, ConfigError, "Found 3 samples, so that no batch is left"),
    ],
)
def test_loaders_that_cannot_work_are_refused(dataset, batch, options, error, message) -> None:
    with pytest.raises(error, match=message):
        Booster(device="cpu").plugin.prepare_dataloader(dataset, batch, **options)


class Backwards(DistributedSampler):
    """From the end."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


def test_another_sampler_can_be_given() -> None:
    assert epochs_of(0, 2, 12, 1, distributed_sampler_cls=Backwards)[0] == [list(range(22, -1, -2))]


def collected(state, rank: int, size: int, batch: int, num_epochs: int, samples: int = 20, **options: Any) -> list[Any]:
    with fake_world(size, rank=rank):
        loader: Any = TorchDDPPlugin().prepare_dataloader(torch.arange(samples), batch, shuffle=True, **options)
        if state is not None:
            loader.load_state_dict(state)
        return [b.tolist() for _ in range(num_epochs) for b in loader]


@pytest.mark.parametrize(
    ("num_read", "options"), [(k, {"drop_last": k % 2 == 0}) for k in range(6)] + [(1, {"num_workers": 1})]
)
def test_any_number_of_ranks_goes_on_with_the_samples_that_none_has_read(num_read, options) -> None:
    with fake_world(2):
        loader: Any = TorchDDPPlugin().prepare_dataloader(torch.arange(20), 4, shuffle=True, **options)
        batches = (batch for _ in range(4) for batch in loader)
        for _ in range(num_read):
            next(batches)
        state = loader.state_dict()
    options = {"drop_last": options.get("drop_last", False)}

    def joint(state, size: int, batch: int) -> list[set[int]]:
        ranks = [collected(state, rank, size, batch, 4, **options) for rank in range(size)]
        return [set().union(*parts) for parts in zip(*ranks, strict=True)]

    expected = joint(None, 2, 4)[num_read:]
    for size in (1, 2, 4):
        found = joint(state, size, 8 // size)
        assert found[: len(expected)] == expected


def test_another_batch_size_goes_on_with_the_next_sample() -> None:
    order = [each for batch in collected(None, 0, 1, 20, 1) for each in batch]
    state = {"epoch": 0, "samples": 8}
    assert collected(state, 0, 1, 3, 1) == [order[8:11], order[11:14], order[14:17], order[17:]]
    assert collected(state, 1, 2, 2, 1) == [order[9:13:2], order[13:17:2], order[17::2]]


@pytest.mark.parametrize(
    ("size", "batch", "advice"),
    [(2, 8, None), (1, 16, None), (3, 5, "number of such ranks that divides 16"), (4, 8, "batch_size=4 to prepare")],
)
def test_other_batches_than_those_saved_are_reported(
    size: int, batch: int, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks that take 16 // 3 samples each go on at the right sample, with steps of 15."""
    said: list[str] = []
    monkeypatch.setattr(DistributedLogger, "warning", lambda _, text, **_options: said.append(text))
    with fake_world(2):
        state = TorchDDPPlugin().prepare_dataloader(torch.arange(64), 8).state_dict()
    with fake_world(size):
        TorchDDPPlugin().prepare_dataloader(torch.arange(64), batch).load_state_dict(state)
    assert len(said) == (advice is not None)
    assert all(f"batches of {size * batch} samples here" in text and advice and advice in text for text in said)


def test_a_checkpoint_keeps_the_position(tmp_path) -> None:
    booster = Booster(device="cpu")
    model, *_ = booster.boost(torch.nn.Linear(1, 1))
    loader = booster.plugin.prepare_dataloader(torch.arange(20), 3, shuffle=True)
    whole = [batch.tolist() for batch in loader]
    rest = iter(loader)
    next(rest)
    booster.save(tmp_path, model, step=8, dataloader=loader)
    again = booster.plugin.prepare_dataloader(torch.arange(20), 3, shuffle=True)
    assert booster.load(tmp_path, model, dataloader=again) == 8
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in rest]
    assert whole != [batch.tolist() for batch in again]
    weight = next(model.parameters()).data.fill_(7.0).clone()
    for options, found in (({"shuffle": True, "seed": 5}, 5), ({}, None)):
        other = booster.plugin.prepare_dataloader(torch.arange(20), 3, **options)
        with pytest.raises(ConfigError, match=f"seed=1024 saved and seed={found} here"):
            booster.load(tmp_path, model, dataloader=other)
        assert next(model.parameters()).equal(weight)  # nothing is loaded
    plain = torch.utils.data.DataLoader(torch.arange(20), 3)
    with pytest.raises(ConfigError, match=r"loader from plugin.prepare_dataloader.*Found a DataLoader"):
        booster.save(tmp_path, model, step=9, dataloader=plain)
    booster.save(tmp_path, model, step=9)
    with pytest.raises(CheckpointError, match=r"Found none in .*step-00000009"):
        booster.load(tmp_path, model, dataloader=again)


@pytest.mark.parametrize("samples", [5, 6, 7])
def test_a_batch_must_be_full_on_every_rank(samples: int) -> None:
    with fake_world(3):
        options = {"shuffle": True, "drop_last": True}
        if samples < 6:
            with pytest.raises(ConfigError, match=r"of 2 samples on each of 3 ranks\. Found 5 samples"):
                TorchDDPPlugin().prepare_dataloader(range(samples), 2, **options)
        else:
            assert len(list(TorchDDPPlugin().prepare_dataloader(range(samples), 2, **options))) == 1
