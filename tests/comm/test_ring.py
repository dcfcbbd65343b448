"""Tensors that go round: whose each one is, and the sum for each rank."""

import torch

from colossal._src.comm import Exchange, ring_all_gather, ring_reduce_scatter
from colossal.cluster import ParallelMesh
from colossal.comm import Channel, CommCounter
from colossal.testing import run_processes

SIZE = 3


def go_round() -> tuple[list[tuple[int, list[float]]], list[float], float, dict]:
    channel, seen = Channel("sp", ParallelMesh(sp=SIZE)), []
    own = torch.arange(2.0) + 10 * channel.rank
    with CommCounter() as counter:
        ring_all_gather(own, channel, lambda rank, tensor: seen.append((rank, tensor.tolist())))
        total = ring_reduce_scatter(lambda rank: torch.tensor([float(rank), 10.0 * channel.rank + rank]), channel)
        ahead, behind = (channel.rank + 1) % SIZE, (channel.rank - 1) % SIZE
        come = Exchange(own, channel, ahead, behind).wait()
    return seen, total.tolist(), come[0].item(), counter.calls


def test_every_rank_sees_the_tensors_of_all_its_own_first() -> None:
    for own, (seen, total, come, calls) in enumerate(run_processes(go_round, SIZE)):
        order = [(own - step) % SIZE for step in range(SIZE)]
        assert seen == [(rank, [10.0 * rank, 10.0 * rank + 1]) for rank in order]
        assert total == [3.0 * own, 30.0 + 3.0 * own]
        assert come == 10.0 * ((own - 1) % SIZE)
        assert calls == {("send", "sp"): 2 + 2 + 1}
