"""Means of squares by rows and columns, which stand for those of all elements of a matrix."""

from collections.abc import Generator, Iterable, Sequence
from math import prod
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
        # its own sums are those of all ranks
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


Factors = tuple[torch.Tensor, torch.Tensor]
"""A number for each row, and one for each column; matrices of more dimensions are stacks of matrices."""


def factor_shapes(placement: Placement) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the row and of the column statistics."""
    return placement.shape[:-1], (*placement.shape[:-2], placement.shape[-1])


def row_and_column_sums(placement: Placement, local: torch.Tensor) -> list[torch.Tensor]:
    """Add the squares of this rank's elements up, by row and by column."""
    rows, columns = (local.new_zeros(shape) for shape in factor_shapes(placement))
    for region, view in placement.views(local):
        squares = view.square()
        rows[region.slices[:-1]] += squares.sum(-1)
        columns[(*region.slices[:-2], region.slices[-1])] += squares.sum(-2)
    return [rows, columns]


def update_factors(means: Factors, sums: list[torch.Tensor], kept: float, eps: float, placement: Placement) -> None:
    """Move means of squares towards new ones, in place."""
    for mean, total, length in zip(means, sums, (placement.shape[-1], placement.shape[-2]), strict=True):
        mean.mul_(kept).add_(total / max(1, length) + eps, alpha=1 - kept)


def divide_by_roots(placement: Placement, local: torch.Tensor, means: Factors) -> torch.Tensor:
    """Divide by the roots of the means of squares."""
    rows, columns = means
    of_rows, of_columns = (rows / rows.mean(-1, keepdim=True)).rsqrt(), columns.rsqrt()
    result = local.clone()
    for region, view in placement.views(result):
        view.mul_(of_rows[region.slices[:-1]].unsqueeze(-1))
        view.mul_(of_columns[(*region.slices[:-2], region.slices[-1])].unsqueeze(-2))
    return result


def clip_rms(update: torch.Tensor, total_of_squares: torch.Tensor, placement: Placement, threshold: float) -> None:
    """Scale an update so that the root of the mean of its squares is at most a threshold, in place."""
    update.div_((rms(total_of_squares, placement) / threshold).clamp(min=1.0))


def rms(total_of_squares: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Take the root of the mean of squares."""
    return (total_of_squares / max(1, prod(placement.shape))).sqrt()
