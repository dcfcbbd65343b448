"""A walk visits states on a disk in order, reads ahead, writes behind, and ends where a transfer fails."""

import gc
import os
from collections.abc import Callable

import pytest
import torch
from tensor_files import SPAN

from colossal.errors import CheckpointError, ConfigError, ShapeError
from colossal.offload import StateStore

pytestmark = pytest.mark.slow


def test_states_are_visited_in_order_and_written_back(engine, disk) -> None:
    numels = [5, 0, 100_000, 17, 1]
    with StateStore(disk, numels, engine=engine) as store:
        for turn in range(3):
            seen = []
            for index, tensors in store.walk([3, 0, 1, 2]):
                seen.append(index)
                for number, tensor in enumerate(tensors):
                    assert tensor.tolist() == [turn * (index + 1) * (number + 1)] * numels[index]
                    tensor.add_((index + 1) * (number + 1))
            assert seen == [3, 0, 1, 2]
        assert [one.tolist() for one in store.load(3)] == [[12.0] * 17, [24.0] * 17]
        assert not store.load(4)[0].any()


def test_a_walk_that_only_reads_writes_nothing(disk) -> None:
    with StateStore(disk, [4] * 6, tensors_per_entry=1) as store:
        for _, (tensor,) in store.walk(is_read_only=True):
            tensor.fill_(1)
        assert not any(store.load(index)[0].any() for index in range(6))


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_reads_go_ahead_and_writes_stay_behind(ahead, disk, monkeypatch) -> None:
    """Proved by the order in which requests begin and are waited for."""
    log: list[str] = []
    store = StateStore(disk, [8] * 8, ahead=ahead)
    for name in ("read", "write"):
        monkeypatch.setattr(store.file, name, recorded(log, name, getattr(store.file, name)))
    for index, _ in store.walk():
        log.append(f"use {index}")
        reads = [entry for entry in log if entry.startswith("read")]
        assert len(reads) == min(index + 1 + ahead, 8)  # begun before the use
        unfinished = [i for i in range(index) if f"wait write {i}" not in log]
        assert unfinished == list(range(max(0, index - ahead), index)) or index + ahead >= 8
        assert f"wait read {index}" in log
        assert f"wait read {index + 1}" not in log
    assert [entry for entry in log if entry.startswith("use")] == [f"use {index}" for index in range(8)]
    assert {entry for entry in log if entry.startswith("wait write")} == {f"wait write {index}" for index in range(8)}
    store.close()


def recorded(log: list[str], name: str, begin: Callable) -> Callable:
    """Note when a request begins, and when somebody waits for it."""

    class Noted:
        def __init__(self, slot: int, request) -> None:
            self.slot, self.request = slot, request

        def wait(self) -> None:
            self.request.wait()
            log.append(f"wait {name} {self.slot}")

    def begin_noted(slot: int, tensor: torch.Tensor) -> Noted:
        log.append(f"{name} {slot}")
        return Noted(slot, begin(slot, tensor))

    return begin_noted


def test_memory_is_as_many_buffers_as_it_says(disk) -> None:
    with StateStore(disk, [8, 4096, 1], ahead=3) as store:
        addresses = {tensors[0].data_ptr() for _ in range(3) for _, tensors in store.walk()}
        assert len(addresses) <= 7
        assert store.num_buffer_bytes == 7 * 2 * 4096 * 4
        assert all(address % 4096 == 0 for address in addresses)


@pytest.mark.parametrize("turn", [0, 3, 7])
def test_a_body_that_raises_leaves_its_own_entry_alone(engine, turn, disk) -> None:
    def spoil(store: StateStore) -> None:
        for index, tensors in store.walk():
            tensors[0].fill_(1)
            if index == turn:
                raise ZeroDivisionError

    with StateStore(disk, [50_000] * 8, engine=engine) as store:
        with pytest.raises(ZeroDivisionError):
            spoil(store)
        gc.collect()
        assert [bool(store.load(index)[0].any()) for index in range(8)] == [index < turn for index in range(8)]
        assert [index for index, _ in store.walk()] == list(range(8))


def test_a_loop_that_is_left(disk) -> None:
    with StateStore(disk, [4] * 8) as store:
        for index, tensors in store.walk():
            tensors[0].fill_(1)
            if index == 2:
                break
        assert [bool(store.load(index)[0].any()) for index in range(8)] == [True, True] + [False] * 6


def test_a_read_that_fails_ends_the_walk(engine, disk) -> None:
    seen = []

    def visit() -> None:
        for index, _ in store.walk():
            seen.append(index)

    with StateStore(disk, [SPAN // 4] * 6, engine=engine) as store:
        os.ftruncate(store.file._flights.file.buffered, 6 * SPAN)
        with pytest.raises(CheckpointError, match="must be read in full"):
            visit()
        assert seen == [0, 1, 2]
        assert store.load(0)


def test_a_write_that_fails_ends_the_walk(disk, monkeypatch) -> None:
    with StateStore(disk, [8] * 6) as store:
        fail_writes(store, monkeypatch)
        with pytest.raises(CheckpointError, match="a write failed"):
            for _ in store.walk():
                pass
        assert store.load(0)


def test_a_write_that_fails_behind_a_loop_that_was_left_is_told_by_the_next_use(disk, monkeypatch) -> None:
    with StateStore(disk, [8] * 6) as store:
        with monkeypatch.context() as patch:
            fail_writes(store, patch)
            for index, _ in store.walk():
                if index == 1:
                    break
        with pytest.raises(CheckpointError, match="a write failed"):
            store.load(0)
        assert store.load(0)


def fail_writes(store: StateStore, monkeypatch) -> None:
    class Failed:
        def wait(self) -> None:
            raise CheckpointError("a write failed")

    monkeypatch.setattr(store.file, "write", lambda _slot, _tensor: Failed())


def test_an_entry_for_a_checkpoint(engine, disk) -> None:
    with StateStore(disk, [6, 3], tensors_per_entry=3, engine=engine) as store:
        store.store(
            1, [torch.ones(3), torch.ones(3, dtype=torch.float64) * 2, torch.nn.Parameter(torch.ones(3, 1) * 3)]
        )
        store.store(0, [torch.arange(6).view(2, 3)] * 3)
        found = store.load(1)
        store.store(1, [torch.zeros(3)] * 3)
        assert [one.tolist() for one in found] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
        assert store.load(0)[2].tolist() == [0, 1, 2, 3, 4, 5]
        assert len(store) == 2


def test_states_refuse_what_cannot_work(disk) -> None:
    with StateStore(disk, [2, 2]) as store:
        for indices in ([0, 0], [2], [-1]):
            with pytest.raises(ConfigError, match="at most once"):
                store.walk(indices)
        with pytest.raises(ShapeError, match="takes 2 tensors of 2 elements"):
            store.store(0, [torch.ones(2)])
        with pytest.raises(ShapeError, match="takes 2 tensors of 2 elements"):
            store.store(0, [torch.ones(2), torch.ones(3)])
        for _ in store.walk():
            with pytest.raises(ConfigError, match="a walk has not ended"):
                store.load(0)
    for numels, tensors, ahead in (([-1], 1, 1), ([1], 0, 1), ([1], 1, 0)):
        with pytest.raises(ConfigError, match="A store of states has"):
            StateStore(disk, numels, tensors, ahead)


def test_a_store_of_nothing(disk) -> None:
    with StateStore(disk, []) as store:
        assert list(store.walk()) == []
