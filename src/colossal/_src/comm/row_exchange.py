"""Rows that travel to other ranks while something else is computed, and gradients that travel back likewise.

Autograd runs the functions of a graph in the reverse order of their forward passes, once their gradients are there. So
what was computed between start and wait is computed backward between these two as well: the backward pass of the wait
starts the exchange of the gradients, and that of the start waits for it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis, ParallelMesh, group_for
from colossal._src.comm.channel import Channel, count_rows
from colossal._src.comm.lost_peers import LostPeerGuard


@final
class RowExchange:
    """The rows that each rank of an axis has for the others, from start to wait.

    With a backend whose collectives run in streams or threads of their own, they travel meanwhile.

    Communication: all_to_all, the axis, the bytes of the rows that leave this rank; backward, of their gradients.
    """

    def __init__(self, axis: Axis, send: Sequence[int], receive: Sequence[int], mesh: ParallelMesh) -> None:
        self._channel, self._send, self._receive = Channel(axis, mesh), send, receive
        self._work: dist.Work | None = None
        self._sent: torch.Tensor | None = None
        self._incoming: torch.Tensor | None = None
        self._back: RowExchange | None = None  # the exchange of gradients that is on its way

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """Begin to send rows, and return a ticket for what comes in: a scalar, whose graph is that of the rows."""
        result: Any = _Start.apply(rows, self)
        return result

    def wait(self, ticket: torch.Tensor) -> torch.Tensor:
        """Wait for what comes in, and return it."""
        result: Any = _Wait.apply(ticket, self)
        return result

    def begin(self, rows: torch.Tensor) -> None:
        """Begin, without a gradient."""
        channel = self._channel
        if channel.size == 1:
            self._incoming = rows.detach()
            return
        self._sent = rows.contiguous()  # kept until it has left
        self._incoming = rows.new_empty(sum(self._receive), *rows.shape[1:])
        count_rows(channel, rows, self._send)
        sizes, group = ([*self._receive], [*self._send]), group_for(rows, channel.group)
        with LostPeerGuard():
            self._work = dist.all_to_all_single(self._incoming, self._sent, *sizes, group=group, async_op=True)

    def finish(self) -> torch.Tensor:
        """Wait, without a gradient."""
        incoming, work = self._incoming, self._work
        assert incoming is not None
        if work is not None:
            with LostPeerGuard():
                work.wait()
        self._work = self._sent = self._incoming = None
        return incoming

    def begin_back(self) -> "RowExchange":
        """Make the exchange of the gradients of one backward pass."""
        back = RowExchange(self._channel.axis, self._receive, self._send, self._channel.mesh)
        back._channel = self._channel  # whose counters are those of the forward pass
        self._back = back
        return back

    def end_back(self) -> "RowExchange":
        """Return that exchange."""
        back, self._back = self._back, None
        assert back is not None
        return back


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.begin(rows)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Wait.apply(grads[0], ctx.exchange.end_back()), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, exchange: RowExchange) -> torch.Tensor:  # noqa: ARG004 (its graph)
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Start.apply(grads[0], ctx.exchange.begin_back()), None
