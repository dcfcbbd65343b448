"""Projection of gradients onto a low-rank subspace, and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, final

import torch

from colossal._src.tensor import Placement
from colossal.errors import ConfigError

_SIDES = {
    "std": lambda shape: (shape[0] < shape[1], shape[0] >= shape[1]),
    "reverse_std": lambda shape: (shape[0] >= shape[1], shape[0] < shape[1]),
    "left": lambda _: (True, False),
    "right": lambda _: (False, True),
    "full": lambda _: (True, True),
}


@final
@dataclass(frozen=True)
class Projection:
    """Orthonormal columns by which a matrix is multiplied on its left, and rows by which on its right."""

    left: torch.Tensor | None  # the columns, (rows of the matrix, rank); None to keep its rows
    right: torch.Tensor | None  # the rows, (rank, columns of the matrix); None to keep its columns

    @classmethod
    def of(cls, matrix: torch.Tensor, rank: int, proj_type: str) -> Self:
        """Find the leading singular subspace of a matrix."""
        is_left, is_right = projected_sides(proj_type, tuple(matrix.shape))
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        left, right = left[:, :rank], right[:rank]
        signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
        return cls(left * signs if is_left else None, right * signs.T if is_right else None)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of a projected matrix."""
        rows = shape[0] if self.left is None else self.left.shape[1]
        return rows, shape[1] if self.right is None else self.right.shape[0]

    def project(self, placement: Placement, local: torch.Tensor) -> torch.Tensor:
        """Project the local shard of a matrix."""
        low = local.new_zeros(self.shape_of(placement.shape))
        for view, left, right, at in self._steps(placement, local):
            moved = view if left is None else left.T @ view
            low[at] += moved if right is None else moved @ right.T
        return low

    def project_back(self, placement: Placement, low: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Project a low-rank matrix back to the local shard."""
        local = torch.empty_like(like)
        for view, left, right, at in self._steps(placement, local):
            moved = low[at] if left is None else left @ low[at]
            view.copy_(moved if right is None else moved @ right)
        return local

    def _steps(
        self, placement: Placement, local: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple[slice, slice]]]:
        """Each local region, the rows and columns of the projections for it, and its slices when projected."""
        for region, view in placement.views(local):
            rows, columns = region.slices
            left = None if self.left is None else self.left[rows]
            right = None if self.right is None else self.right[:, columns]
            yield view, left, right, (rows if left is None else slice(None), columns if right is None else slice(None))


def projected_sides(proj_type: str, shape: tuple[int, ...]) -> tuple[bool, bool]:
    """Return which sides of a matrix are projected."""
    if proj_type not in _SIDES:
        raise ConfigError(f"proj_type is one of {', '.join(_SIDES)}. Found {proj_type!r}. Pass one of them.")
    return _SIDES[proj_type](shape)
