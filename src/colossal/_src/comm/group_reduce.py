# pyright: reportUnknownMemberType=false
"""Totals over process groups instead of axes: for tensors that know their groups, such as shards."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, final

import torch
from torch import distributed as dist

from colossal._src.cluster import Axis, current_mesh, group_for, host_group
from colossal._src.comm.counter import active_counters, uncounted
from colossal._src.comm.lost_peers import LostPeerGuard
from colossal.errors import CommunicationError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@final
class _Gathered:
    """What a rank contributes to `gather_objects`, and why it was called there."""

    def __init__(self, purpose: str, value: Any) -> None:
        self.purpose, self.value = purpose, value


def gather_objects(
    value: Any, groups: Iterable[dist.ProcessGroup] | None = None, purpose: str = "exchanges objects"
) -> list[Any]:
    """Let all ranks know a value of each, as it can be pickled: for messages, not for the data of a step.

    Args:
        value: That of this rank.
        groups: The ranks; all by default.
        purpose: What this rank does, as a verb in the third person. Ranks that came here for something else, as one
            that left a loop earlier, are reported by it.

    Raises:
        CommunicationError: The ranks called this for different purposes; on all of them.

    Communication: all_gather_object, all ranks, the bytes of the values.
    """
    held: list[Any] = [_Gathered(purpose, value)]
    for group in (dist.group.WORLD,) if groups is None else groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        with LostPeerGuard():
            dist.all_gather_object(gathered, held, group=host_group(group))
        lists: list[list[Any]] = [rank if isinstance(rank, list) else [rank] for rank in gathered]
        held = [each for one in lists for each in one]
    # after the last group, so that its ranks do not wait for one that raises
    purposes = {each.purpose if isinstance(each, _Gathered) else "calls something else" for each in held}
    if purposes != {purpose}:
        raise CommunicationError(
            f"All ranks of a group make the same calls. Found that rank {dist.get_rank()} {purpose}, while another one "
            f"{' or '.join(sorted(purposes - {purpose}))}. Often one rank left a loop earlier: go through the same "
            "number of batches on all ranks, as those of a loader from plugin.prepare_dataloader."
        )
    return [each.value for each in held]


def equal_on_all_ranks(numbers: Sequence[int], groups: Iterable[dist.ProcessGroup]) -> list[bool]:
    """Return which numbers are the same on all ranks, such as digests of what all of them should have.

    Communication: all_reduce, the groups, 16 bytes for each number; not counted, as it is no part of training.
    """
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    with uncounted():
        # The largest ~x is ~ of the smallest x, so one all-reduce finds both; unlike -x, ~x never overflows.
        largest, smallest = all_reduce_over(torch.stack([own, ~own]), groups, "max")
    equal = largest == ~smallest
    return cast("list[bool]", equal.tolist())  # one read of the host, however many numbers there are


def equal_text_on_all_ranks(text: str, groups: Iterable[dist.ProcessGroup]) -> bool:
    """Return whether a text, however long, is the same on all ranks: only its digest is sent.

    Communication: all_reduce, the groups, 16 bytes; not counted.
    """
    return all(equal_on_all_ranks([int64_digest(text)], groups))


def int64_digest(*contents: str | torch.Tensor) -> int:
    """Hash texts and the values of tensors, for `equal_on_all_ranks`."""
    import xxhash

    state = xxhash.xxh3_64()
    for each in contents:
        if isinstance(each, str):
            state.update(each.encode())
        else:
            state.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.intdigest() - 2**63


def all_reduce_over(
    tensor: torch.Tensor,
    groups: Iterable[dist.ProcessGroup],
    op: Literal["sum", "max"] = "sum",
    axis: Axis | None = None,
) -> torch.Tensor:
    """Combine the ranks' tensors over one group after another, without gradients.

    Over the groups of two axes of a mesh, this is the total over all ranks that the axes span.

    Args:
        tensor: Any shape, the same on all ranks; in host memory, or on the accelerator.
        groups: The process groups; a group of one rank is left out.
        op: Add the tensors up, or take the largest of each element.
        axis: The axis of the mesh under which calls are counted, for groups that are parts of one; by default that
            of the ambient mesh whose group it is; a group of the user's own is that of none, and is not counted.

    Returns:
        The total, in a new tensor of the same shape; `tensor` itself if there is nothing to combine.

    Communication: all_reduce, the groups' axes, the tensor's bytes; once for each group.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.comm import all_reduce_over
        >>> from colossal.testing import run_threads
        >>> def program():
        ...     mesh = ParallelMesh(dp=2)
        ...     found = torch.tensor([mesh.rank("dp"), 1 - mesh.rank("dp")])
        ...     return all_reduce_over(found, [mesh.group("dp")], "max").tolist()
        >>> run_threads(program, 2)
        [[1, 1], [1, 1]]
    """
    for group in groups:
        size = dist.get_world_size(group)
        if size > 1:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            with LostPeerGuard():
                dist.all_reduce(tensor, op=_OPS[op], group=group_for(tensor, group))
            for counter in active_counters():
                for each in (axis,) if axis else current_mesh().axes_of(group):
                    counter.add("all_reduce", each, 2 * tensor.nbytes * (size - 1) // size)
    return tensor
