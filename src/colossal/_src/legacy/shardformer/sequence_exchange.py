"""The exchange of Ulysses: sequences that are sharded become heads that are, and back."""

import torch

from colossal._src import comm
from colossal._src.legacy.shardformer.group_layer import Group, mesh_of, refuse_options


def all_to_all_comm(  # noqa: D417 (written with a backslash: reStructuredText takes input_ for a link)
    input_: torch.Tensor,
    process_group: Group = None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    fp8_communication: bool = False,
) -> torch.Tensor:
    r"""Shard a tensor along one dimension instead of another, with its gradient.

    Superseded by `colossal.comm.all_to_all`.

    Args:
        input\_: Any shape, the same on all ranks.
        process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.
        scatter_dim: The dimension that is sharded afterwards.
        gather_dim: The dimension that was sharded.
        fp8_communication: Only False.

    Returns:
        The tensor.

    Raises:
        ShapeError: The dimension cannot be divided among the ranks.
        UnsupportedError: `fp8_communication`.

    Communication: all_to_all, the group, the tensor's bytes; backward the same.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import all_to_all_comm
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     all_to_all_comm(torch.ones(1, 3, 4)).shape
        torch.Size([1, 6, 2])
    """
    refuse_options(all_to_all_comm, fp8_communication=fp8_communication)
    return comm.all_to_all(input_, "tp", scatter_dim, gather_dim, mesh_of(process_group))
