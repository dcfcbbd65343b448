"""Which tokens of a sequence a rank has."""

from dataclasses import dataclass
from typing import final

import torch

from colossal import comm
from colossal.cluster import Axis, ParallelMesh
from colossal.errors import ShapeError


@final
@dataclass(frozen=True)
class SequenceSharding:
    """Divides sequences among the ranks of an axis, equally.

    Args:
        mesh: The mesh.
        axis: The axis, sp or tp.
        is_zigzag: Cut a sequence into twice as many pieces as there are ranks, and give rank i those numbered i from
            the front and from the end. Under causal attention each rank has as much to compute then; otherwise the last
            has most, as its tokens look at all before them.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.attention import SequenceSharding
        >>> from colossal.testing import fake_world
        >>> with fake_world(2, rank=1):
        ...     SequenceSharding(ParallelMesh(sp=2), "sp", is_zigzag=True).split(torch.arange(8), dim=0)
        tensor([2, 3, 4, 5])
    """

    mesh: ParallelMesh
    axis: Axis = "sp"
    is_zigzag: bool = False

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.mesh.size(self.axis)

    def split(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Keep this rank's tokens.

        Args:
            tensor: The same on all ranks.
            dim: The dimension of tokens.

        Returns:
            Its part; the gradient of the others' tokens is zero on this rank.

        Raises:
            ShapeError: The tokens do not divide evenly.
        """
        pieces = self._pieces(self.mesh.rank(self.axis))
        number = self.size * len(pieces)
        if tensor.shape[dim] % number:
            length = tensor.shape[dim]
            raise ShapeError(
                f"A sequence that {self.size} ranks share is cut into {number} equal pieces. Found {length} tokens. "
                f"Pad batches to a multiple of {number}, such as {-(-length // number) * number}, with tokens that the "
                "attention mask and the labels leave out."
            )
        parts = tensor.chunk(number, dim)
        return torch.cat([parts[piece] for piece in pieces], dim) if self.is_zigzag else parts[pieces[0]]

    def gather(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Put the tokens of all ranks together.

        Args:
            tensor: This rank's tokens.
            dim: Their dimension.

        Returns:
            The whole tensor, on all ranks. All may compute the same from it, or different things: the gradient of a
            token is the sum of the ranks'.

        Communication: all_gather, the axis, the result's bytes; backward reduce_scatter, the same.
        """
        whole = comm.gather(tensor, self.axis, dim, self.mesh, partial_grad=True)
        if not self.is_zigzag:
            return whole
        order = [piece for rank in range(self.size) for piece in self._pieces(rank)]
        parts = whole.chunk(len(order), dim)
        return torch.cat([parts[order.index(piece)] for piece in range(len(order))], dim)

    def positions(self, rank: int, num_own: int, device: torch.device) -> torch.Tensor:
        """Tell where in the whole sequence a rank's tokens are.

        Args:
            rank: Its index on the axis.
            num_own: How many tokens a rank has.
            device: Where the answer goes.

        Returns:
            The positions; (num_own).
        """
        pieces = self._pieces(rank)
        length = num_own // len(pieces)
        return torch.cat([torch.arange(each * length, (each + 1) * length, device=device) for each in pieces])

    def _pieces(self, rank: int) -> list[int]:
        return [rank, 2 * self.size - 1 - rank] if self.is_zigzag else [rank]
