"""Sums over ranks that many parameters request at the same time, batched into few collectives."""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, final

import torch

from colossal._src.comm import all_reduce_over
from colossal._src.tensor import Placement

SumRequests = Generator[list[torch.Tensor], list[torch.Tensor], None]
"""An update that yields local sums, and receives the sums over all ranks."""


@final
class _PendingUpdate:
    """An update that waits for sums over the groups of its parameter."""

    def __init__(self, placement: Placement, update: SumRequests) -> None:
        self.placement, self._update = placement, update
        self.asked = next(update, None)

    def answer(self, totals: list[torch.Tensor]) -> None:
        try:
            self.asked = self._update.send(totals)
        except StopIteration:
            self.asked = None


def run_with_batched_sums(updates: Iterable[tuple[Placement, SumRequests]]) -> None:
    """Run updates concurrently, and send together what they request at the same time.

    The update of a full parameter ends before the next one begins, so their memory is not needed at the same time.

    Communication: all_reduce, the axes that shard the parameters, the bytes of the sums; one for each round.
    """
    waiting = []
    for placement, update in updates:
        one = _PendingUpdate(placement, update)
        while not placement.shard_groups and one.asked is not None:
            one.answer(one.asked)
        waiting.append(one)
    while waiting := [one for one in waiting if one.asked is not None]:
        for one, totals in zip(waiting, _totals(waiting), strict=True):
            one.answer(totals)


def _totals(waiting: Sequence[_PendingUpdate]) -> list[list[torch.Tensor]]:
    """What each update asked for, over all ranks."""
    asked = [(one.placement, tensor) for one in waiting for tensor in one.asked or ()]
    together: dict[tuple[Any, torch.dtype, torch.device, torch.device], list[int]] = {}
    for i, (placement, tensor) in enumerate(asked):
        key = placement.shard_groups, tensor.dtype, tensor.device, placement.comm_device(tensor.device)
        together.setdefault(key, []).append(i)
    found: dict[int, torch.Tensor] = {}
    for (groups, _, here, there), places in together.items():
        parts = [asked[i][1] for i in places]
        total = all_reduce_over(torch.cat([part.reshape(-1) for part in parts]).to(there), groups).to(here)
        totals = total.split([part.numel() for part in parts])
        found.update({i: own.view(asked[i][1].shape) for i, own in zip(places, totals, strict=True)})
    in_order = iter(found[i] for i in range(len(asked)))
    return [[next(in_order) for _ in one.asked or ()] for one in waiting]
