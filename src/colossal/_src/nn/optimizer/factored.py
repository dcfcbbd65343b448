"""Means of squares by rows and columns, which stand for those of all elements of a matrix."""

from math import prod

import torch

from colossal._src.tensor import Placement

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
