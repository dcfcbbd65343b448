# pyright: reportMissingImports=false
"""Collectives of the group of a mode, and messages between stages, by the older names."""

from typing import Any

import pytest
import torch
from torch import distributed as dist

from colossal._src.cluster import set_current_config
from colossal.communication import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from colossal.communication.p2p import (
    recv_backward,
    recv_forward,
    send_backward,
    send_backward_recv_forward,
    send_forward,
    send_forward_recv_backward,
)
from colossal.communication.utils import recv_obj_meta, send_obj_meta
from colossal.errors import MeshError, UnsupportedError
from colossal.legacy.context import ParallelMode, global_context
from colossal.testing import fake_world, run_processes

RANKS, SIZE = 4, 4


def collectives() -> dict[str, Any]:
    try:
        global_context.load_config({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
        global_context.init_parallel_groups()
        rank = global_context.get_global_rank()
        first = 2 * (rank // 2)
        own = rank * SIZE + torch.arange(SIZE)
        gathered, work = all_gather(own, 0, ParallelMode.GLOBAL, async_op=True)
        assert work.wait()
        assert work.is_completed()
        summed = own.clone()
        assert all_reduce(summed, ParallelMode.TENSOR) is summed
        found = {
            "gathered": gathered,
            "scattered": reduce_scatter(own, 0, ParallelMode.GLOBAL),
            "summed": summed,
            "largest": all_reduce(own.clone(), ParallelMode.DATA, dist.ReduceOp.MAX),
            "sent": broadcast(own.clone(), first + 1, ParallelMode.TENSOR),
        }
        reduced = reduce(own.clone(), first, ParallelMode.TENSOR)
        return found | ({"reduced": reduced} if rank == first else {})
    finally:
        set_current_config(None)


def test_collectives_run_in_the_group_of_a_mode() -> None:
    every = torch.arange(RANKS * SIZE).view(RANKS, SIZE)
    for rank, found in enumerate(run_processes(collectives, RANKS)):
        pair = every[2 * (rank // 2) : 2 * (rank // 2) + 2]
        assert torch.equal(found["gathered"], every.flatten())
        assert torch.equal(found["scattered"], every.sum(0)[rank : rank + 1])
        assert torch.equal(found["summed"], pair.sum(0))
        assert torch.equal(found["largest"], every[rank % 2 :: 2].max(0).values)
        assert torch.equal(found["sent"], pair[1])
        assert rank % 2 or torch.equal(found["reduced"], pair.sum(0))


def messages() -> list[Any]:
    try:
        global_context.load_config({"parallel": {"pipeline": 3}})
        global_context.init_parallel_groups()
        rank = global_context.get_local_rank(ParallelMode.PIPELINE)
        own = torch.full((2, 3), float(rank))
        assert not send_obj_meta(own)
        came = [recv_forward(recv_obj_meta((2, 3)))]
        send_forward(own)
        came.append(recv_backward((2, 3)))
        send_backward([own, own + 0.5])
        if rank == 0:
            came.append(send_forward_recv_backward(own, (2, 3)))
        elif rank == 1:
            came.append(send_backward_recv_forward(-own, (2, 3)))
        return came
    finally:
        set_current_config(None)


def test_messages_go_between_adjacent_stages() -> None:
    first, second, third = run_processes(messages, 3)
    assert first[0] is None
    assert [each.unique().item() for each in first[1]] == [1.0, 1.5]
    assert torch.equal(first[2], torch.full((2, 3), -1.0))
    assert torch.equal(second[0], torch.zeros(2, 3))
    assert [each.unique().item() for each in second[1]] == [2.0, 2.5]
    assert torch.equal(second[2], torch.zeros(2, 3))
    assert torch.equal(third[0], torch.ones(2, 3))
    assert third[1] is None


def test_what_does_not_fit_is_refused() -> None:
    with fake_world(2):
        global_context.init_parallel_groups()
        with pytest.raises(UnsupportedError, match="Scale what a sum gives"):
            all_reduce(torch.ones(1), ParallelMode.GLOBAL, dist.ReduceOp.PRODUCT)
        with pytest.raises(MeshError, match="Found 5"):
            broadcast(torch.ones(1), 5, ParallelMode.GLOBAL)
    with pytest.raises(ImportError, match="ring_attention"):
        exec("from colossal.communication.ring import ring_forward")  # noqa: S102 (the statement of a program)
