"""Buffers that ranks divide among themselves, with and without other ranks that own the same segments."""

from typing import Any, cast

import pytest
import torch
from torch import distributed as dist

from colossal._src.comm import Partition, PendingComm
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.testing import run_processes, run_threads

SIZE = 4


def buffer_of(rank: int) -> torch.Tensor:
    return torch.arange(8.0) * (rank + 1)


def share(length: int) -> dict[str, Any]:
    """All steps of one buffer, on blocks of some length."""
    mesh = ParallelMesh(dp=SIZE)
    partition = Partition(*mesh.blocks("dp", length)) if length < SIZE else Partition(mesh.group("dp"))
    buffer, own = buffer_of(mesh.global_rank), torch.empty(8 // length)
    with CommCounter() as counter:
        partition.start_reduce_scatter(buffer, own).wait()
    whole = torch.zeros(8)
    partition.segment(whole).copy_(own)
    partition.start_all_gather(whole).wait()
    ranks = torch.tensor([float(mesh.global_rank), 1.0])
    return {
        "own": own.tolist(),
        "whole": whole.tolist(),
        "totals": [partition.total(ranks).tolist(), partition.total(ranks, "max").tolist()],
        "members": partition.members,
        "sizes": (partition.size, partition.num_replicas, partition.world_size),
        "bytes": counter.bytes,
    }


@pytest.mark.parametrize("length", [1, 2, SIZE])
def test_each_segment_of_the_sum_over_all_ranks_goes_to_its_owners(length) -> None:
    total = (10 * torch.arange(8.0)).tolist()
    for rank, found in enumerate(run_threads(share, SIZE, length)):
        place, each = rank % length, 8 // length
        assert found["own"] == total[place * each : (place + 1) * each]
        assert found["whole"] == total
        assert found["totals"] == [[6.0, 4.0], [3.0, 1.0]]
        assert found["members"] == tuple((other, other % length) for other in range(SIZE))
        assert found["sizes"] == (length, SIZE // length, SIZE)
        sent = {
            "reduce_scatter": 32 * (length - 1) // length,
            "all_reduce": 2 * 4 * each * (SIZE // length - 1) * length // SIZE,
        }
        assert found["bytes"] == {(op, "dp"): count for op, count in sent.items() if count}


def sums_over_gloo() -> tuple[list[float], list[float], list[float]]:
    """Gloo's own way, on three ranks: a sum in half precision, and one into the buffer itself."""
    group = dist.new_group([0, 1, 2], backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    partition = Partition(group)
    half = torch.full((6,), 256.0 if dist.get_rank() == 1 else 1.0, dtype=torch.bfloat16)
    rounded = torch.empty(2, dtype=torch.bfloat16)
    partition.start_reduce_scatter(half, rounded).wait()
    buffer = torch.arange(6.0) + 10 * dist.get_rank()
    scratch = torch.empty(partition.scratch_numel(buffer))
    own = partition.segment(buffer)
    partition.start_reduce_scatter(buffer, own, scratch).wait()
    summed = own.tolist()
    partition.start_all_gather(buffer).wait()
    return rounded.tolist(), summed, buffer.tolist()


def test_sums_over_gloo_are_rounded_once() -> None:
    total = [3.0 * each + 30.0 for each in range(6)]
    for rank, (rounded, own, whole) in enumerate(run_processes(sums_over_gloo, 3)):
        assert rounded == [258.0, 258.0]  # 256 + 1 is 256 in bfloat16
        assert own == total[2 * rank : 2 * rank + 2]
        assert whole == total


def test_all_works_are_waited_for_before_what_is_left_is_done_once() -> None:
    done = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            done.append(self.name)

    pending = PendingComm(cast("list[dist.Work]", [Work("one"), Work("two")]), lambda: done.append("then"))
    pending.wait()
    pending.wait()
    assert done == ["one", "two", "then"]
