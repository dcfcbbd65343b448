"""Which tokens of a sequence a rank has."""

from dataclasses import dataclass
from typing import final

import torch

from colossal._src import comm
from colossal._src.cluster import Axis, ParallelMesh
from colossal.errors import ShapeError


@final
@dataclass(frozen=True)
class SequenceSharding:
    """Shards sequences equally over the ranks of an axis.

    Args:
        mesh: The mesh.
        axis: The axis, sp or tp.
        is_zigzag: Split a sequence into two chunks per rank, and assign to rank i chunk i from the start and chunk i
            from the end. Under causal attention all ranks then have equal work; otherwise the last rank has most, as
            its tokens attend to all earlier ones.

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
        """Number of ranks over which a sequence is sharded."""
        return self.mesh.size(self.axis)

    def split(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Keep this rank's tokens.

        Args:
            tensor: The same on all ranks.
            dim: The dimension of tokens.

        Returns:
            Its shard of the tokens; on this rank, the gradient of other ranks' tokens is zero.

        Raises:
            ShapeError: The tokens do not divide evenly.
        """
        self.check_length(tensor.shape[dim])
        chunks = self._chunks_of(self.mesh.rank(self.axis))
        parts = tensor.chunk(self.size * len(chunks), dim)
        return torch.cat([parts[chunk] for chunk in chunks], dim) if self.is_zigzag else parts[chunks[0]]

    def check_length(self, length: int) -> None:
        """Reject sequences that cannot be sharded.

        Args:
            length: Their number of tokens.

        Raises:
            ShapeError: The tokens do not divide evenly.
        """
        number = self.size * len(self._chunks_of(0))
        if length % number:
            raise ShapeError(
                f"A sequence sharded over {self.size} ranks is split into {number} equal chunks. Found {length} "
                f"tokens. Pad batches to a multiple of {number}, such as {-(-length // number) * number}, with tokens "
                "that the attention mask and the labels leave out."
            )

    def gather(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Gather the tokens of all ranks.

        Args:
            tensor: This rank's tokens.
            dim: Their dimension.

        Returns:
            The full tensor, on all ranks. They may compute the same from it, or different things: the gradient of a
            token is the sum over the ranks.

        Communication: all_gather, the axis, the result's bytes; backward reduce_scatter, the same.
        """
        full = comm.gather(tensor, self.axis, dim, self.mesh, partial_grad=True)
        if not self.is_zigzag:
            return full
        order = [chunk for rank in range(self.size) for chunk in self._chunks_of(rank)]
        parts = full.chunk(len(order), dim)
        return torch.cat([parts[order.index(chunk)] for chunk in range(len(order))], dim)

    def positions(self, rank: int, num_own: int, device: torch.device) -> torch.Tensor:
        """Find the positions of a rank's tokens in the full sequence.

        Args:
            rank: Its index on the axis.
            num_own: How many tokens a rank has.
            device: Where the answer goes.

        Returns:
            The positions; (num_own).
        """
        chunks = self._chunks_of(rank)
        length = num_own // len(chunks)
        return torch.cat([torch.arange(chunk * length, (chunk + 1) * length, device=device) for chunk in chunks])

    def _chunks_of(self, rank: int) -> list[int]:
        return [rank, 2 * self.size - 1 - rank] if self.is_zigzag else [rank]
