"""Tensors that go round the ranks of an axis, one step at a time, while something is computed from those at hand."""

from collections.abc import Callable
from typing import final

import torch
from torch import distributed as dist

from colossal._src.comm.channel import Channel
from colossal._src.comm.counter import active_counters


@final
class Exchange:
    """A tensor on its way to one rank of an axis, and another one of the same shape coming from another.

    Communication: send, the axis, the tensor's bytes; none if both ranks are this one.
    """

    def __init__(self, tensor: torch.Tensor, channel: Channel, dst: int, src: int) -> None:
        self._sent, self._received, self._works = tensor, tensor, []
        if dst == channel.rank:
            return
        ranks = channel.mesh.ranks(channel.axis)
        self._received = torch.empty_like(tensor)
        sending = dist.P2POp(dist.isend, tensor, ranks[dst], channel.group)
        receiving = dist.P2POp(dist.irecv, self._received, ranks[src], channel.group)
        # Together: if each rank of the ring sent first and waited, none would come to its receive.
        self._works = dist.batch_isend_irecv([sending, receiving])
        for counter in {*channel.counters, *active_counters()}:
            counter.add("send", channel.axis, tensor.nbytes)

    def wait(self) -> torch.Tensor:
        """Wait for both."""
        for work in self._works:
            work.wait()
        return self._received


def ring_all_gather(tensor: torch.Tensor, channel: Channel, visit: Callable[[int, torch.Tensor], None]) -> None:
    """Let every rank see the tensors of all.

    Communication: send, the axis, the tensor's bytes, once for each other rank.
    """
    tensor = tensor.contiguous()
    for step in range(channel.size):
        # Started before the visit, so that it travels while the visitor computes.
        ahead = _start(tensor, channel) if step < channel.size - 1 else None
        visit((channel.rank - step) % channel.size, tensor)
        tensor = tensor if ahead is None else ahead.wait()


def ring_reduce_scatter(part_of: Callable[[int], torch.Tensor], channel: Channel) -> torch.Tensor:
    """Sum up what all ranks have for each rank.

    Communication: send, the axis, the result's bytes, once for each other rank.
    """
    arriving: Exchange | None = None
    for step in range(1, channel.size):
        # Computed before the sum that is on its way is waited for.
        part = part_of((channel.rank - step) % channel.size)
        arriving = _start(_joined(part, arriving), channel)
    return _joined(part_of(channel.rank), arriving)


def _joined(part: torch.Tensor, arriving: Exchange | None) -> torch.Tensor:
    return part.contiguous() if arriving is None else arriving.wait().add_(part)


def _start(tensor: torch.Tensor, channel: Channel) -> Exchange:
    return Exchange(tensor, channel, (channel.rank + 1) % channel.size, (channel.rank - 1) % channel.size)
