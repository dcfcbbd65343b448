"""One chunk: its two forms, where its parts are, and how values come into it and out of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from colossal._src.comm import Partition
from colossal._src.zero import ZeroConfig
from colossal._src.zero.gemini import Chunk, ChunkPlacement
from colossal.cluster import ParallelMesh
from colossal.tensor import full_tensor_of
from colossal.testing import fake_world, run_threads
from colossal.zero.gemini import DeviceMemory, MemoryTier, TensorState, TransferLog

HOMES = {
    "device": ChunkPlacement(),
    "optimizer on the host": ChunkPlacement(MemoryTier.DEVICE, MemoryTier.HOST),
    "host": ChunkPlacement(MemoryTier.HOST, MemoryTier.HOST),
    "whole": ChunkPlacement(is_full=True),
    "whole, optimizer on the host": ChunkPlacement(MemoryTier.DEVICE, MemoryTier.HOST, is_full=True),
}


def values() -> list[torch.Tensor]:
    return [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.arange(8.0, 13.0)]


def make(size: int, placement: ChunkPlacement = HOMES["device"], dtype: torch.dtype | None = None) -> Chunk:
    partition = Partition(ParallelMesh(dp=size).group("dp"))
    memory = DeviceMemory(torch.device("cpu"), budget=10_000)
    parameters = [nn.Parameter(each.clone()) for each in values()]
    chunk = Chunk(parameters, partition, ZeroConfig(stage=2), memory, TransferLog(), placement, dtype)
    for index, each in enumerate(values()):
        chunk.load_values(index, each)
    if chunk.is_always_full:
        chunk.refresh(only_written=False)
    return chunk


def forms(size: int, placement: ChunkPlacement) -> Any:
    chunk = make(size, placement)
    between = [parameter.detach().clone() for parameter in chunk.parameters]
    before = dict(chunk._memory.used)
    if not chunk.is_always_full:
        assert chunk.full is None
        assert not chunk.is_prefetching
        chunk.start_fetch()
        assert chunk.is_prefetching
        chunk.attach()
        assert not chunk.is_prefetching
    whole = [parameter.detach().clone() for parameter in chunk.parameters]
    during = dict(chunk._memory.used)
    states = list(chunk.states)
    chunk.release()
    after = [parameter.detach().clone() for parameter in chunk.parameters]
    shards = [full_tensor_of(shard).detach().clone() for shard in chunk.shards]
    return between, whole, after, shards, before, during, dict(chunk._memory.used), states, chunk


@pytest.mark.parametrize("placement", HOMES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_two_forms(placement: str, size: int) -> None:
    for between, whole, after, shards, before, during, end, states, chunk in run_threads(
        forms, size, size, HOMES[placement]
    ):
        assert chunk.numel == -(-12 // size) * size
        for found in (whole, shards):
            assert all(torch.equal(each, wanted) for each, wanted in zip(found, values(), strict=True))
        assert states == [TensorState.HOLD] * 3
        if chunk.is_always_full:
            assert all(torch.equal(each, wanted) for each, wanted in zip(after, values(), strict=True))
            assert before == during == end
        else:
            for found in (between, after):
                assert [each.shape for each in found] == [each.shape for each in values()]
                assert all(each.isnan().all() for each in found), "nothing reads a released parameter unnoticed"
            assert during["parameters"] == before["parameters"] + chunk.num_bytes
            assert before == end


@pytest.mark.parametrize("placement", HOMES)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_on_the_device(placement: str, size: int, dtype: torch.dtype) -> None:
    with fake_world(size):
        chunk = make(size, HOMES[placement], dtype)
        targets = chunk.targets
    length, wide = chunk.numel // size, dtype == torch.bfloat16
    fixed = HOMES[placement].is_full or (size == 1 and HOMES[placement].parameters is MemoryTier.DEVICE)
    assert chunk.is_always_full == fixed
    parts = chunk.numel if fixed else (0 if placement == "host" else length)
    assert chunk._memory.used["parameters"] == parts * dtype.itemsize
    assert chunk._memory.used["optimizer"] == (
        4 * length if wide and HOMES[placement].optimizer is MemoryTier.DEVICE else 0
    )
    assert chunk.has_copy == (wide or HOMES[placement].optimizer is not HOMES[placement].parameters)
    assert chunk.master.dtype == torch.float32
    assert bool(targets) == chunk.has_copy


def update(size: int, placement: ChunkPlacement, dtype: torch.dtype) -> Any:
    chunk = make(size, placement, dtype)
    with torch.no_grad():
        for shard in chunk.shards:
            shard.add_(0.5)
    changes = chunk.num_updates
    chunk.start_gather().wait()
    if not chunk.is_always_full:
        assert chunk.full is None, "old values are given back"
        chunk.start_fetch().wait()
        chunk.attach()
    return [parameter.detach().float().clone() for parameter in chunk.parameters], chunk.num_updates - changes


@pytest.mark.parametrize("placement", HOMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_reaches_the_parameters(placement: str, dtype: torch.dtype) -> None:
    for found, num_updates in run_threads(update, 2, 2, HOMES[placement], dtype):
        assert num_updates == 1
        assert all(torch.equal(each, wanted + 0.5) for each, wanted in zip(found, values(), strict=True))


def run(work: Iterator[int]) -> list[int]:
    """Let it take what it announces."""
    return list(work)


def reduce(size: int, placement: ChunkPlacement, passes: int) -> Any:
    chunk = make(size, placement)
    rank = torch.distributed.get_rank()
    for number in range(passes):
        for index, parameter in enumerate(chunk.parameters):
            if index == 1 and number:
                continue  # brings no gradient in later passes
            parameter.grad = torch.full(parameter.shape, float(rank + 1 + number))
            run(chunk.copy_grad(index))
            assert parameter.grad is None
            assert chunk.states[index] is TensorState.READY_FOR_REDUCE
        assert chunk.is_ready == (number == 0)
        run(chunk.start_reduction())
        run(chunk.finish_reduction())
        assert TensorState.READY_FOR_REDUCE not in chunk.states
    found = [full_tensor_of(grad).clone() for _, grad in chunk.grads()]
    used = chunk._memory.used["gradients"]
    chunk.discard()
    return found, used, chunk._memory.used["gradients"], chunk.numel


@pytest.mark.parametrize("placement", HOMES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_averaged_and_added_up(placement: str, size: int, passes: int) -> None:
    for (first, second, third), used, after, numel in run_threads(reduce, size, size, HOMES[placement], passes):
        mean = sum(range(1, size + 1)) / size
        assert torch.allclose(first, torch.full((2, 3), sum(mean + number for number in range(passes))))
        assert torch.allclose(third, torch.full((5,), sum(mean + number for number in range(passes))))
        assert second.item() == pytest.approx(mean)
        assert used == (0 if HOMES[placement].optimizer is MemoryTier.HOST else numel // size * 4)
        assert after == 0


def test_what_was_broken_off_is_forgotten() -> None:
    with fake_world(2):
        chunk = make(2)
        chunk.start_fetch()
        chunk.attach()
        chunk.num_pins = 2
        chunk.states[0] = TensorState.COMPUTE
        chunk.parameters[2].grad = torch.ones(5)
        assert run(chunk.copy_grad(2)) == [chunk.numel * 4], "it says what it is going to take"
        chunk.discard()
        assert chunk.num_pins == 0
        assert chunk.states == [TensorState.HOLD] * 3
        assert chunk._memory.used["gradients"] == 0
        assert not chunk.is_ready


def test_a_chunk_that_is_looked_at() -> None:
    with fake_world(2):
        chunk = make(2)
        assert not chunk.is_referenced
        assert not chunk.uses_storage(torch.zeros(3).untyped_storage())
        chunk.start_fetch()
        chunk.attach()
        assert not chunk.is_referenced
        assert chunk.full is not None
        view = chunk.full[3:5]
        assert chunk.uses_storage(view.untyped_storage())
        assert chunk.is_referenced
        del view
        assert not chunk.is_referenced


def write(size: int, dtype: torch.dtype) -> Any:
    """Somebody writes values into `rest`, such as those of a checkpoint; small ones of the master stay."""
    chunk = make(size, HOMES["optimizer on the host"], dtype)
    with torch.no_grad():
        chunk.master.add_(1e-4)
        chunk.shard[0] = 99
    chunk.refresh(only_written=False)
    return chunk.master.clone()


def test_written_values_reach_the_master() -> None:
    (master,) = run_threads(write, 1, 1, torch.bfloat16)
    expected = torch.cat([each.flatten() for each in values()]) + 1e-4
    assert master[0] == 99
    kept = expected.bfloat16() == (expected - 1e-4).bfloat16()
    assert kept[1:].all()
    torch.testing.assert_close(master[1:12], expected[1:])
