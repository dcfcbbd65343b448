"""All-gather and reduce-scatter by point-to-point messages, in which no rank sends anything to itself.

Gloo's own all-gather and all-to-all copy what a rank keeps, more than once; as point-to-point messages, the same bytes
cost a third of the processor's time, or less (benchmarks/cpu_collectives.py).
"""

from collections.abc import Callable, Sequence

import torch
from torch import distributed as dist

from colossal._src._dtypes import HALF_DTYPES

_TAG = 0x5EC7


def all_gather_pairwise(full: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to gather all shards of a tensor on all ranks."""
    parts, own = full.chunk(dist.get_world_size(group)), dist.get_rank(group)
    return _exchange([parts[own]] * len(parts), parts, group)


def reduce_scatter_pairwise(
    own: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor | None = None
) -> tuple[list[dist.Work], Callable[[], object]]:
    """Begin to sum the ranks' tensors, each rank one shard."""
    parts, rank = full.chunk(dist.get_world_size(group)), dist.get_rank(group)
    room = torch.empty_like(full[: len(full) - len(parts[rank])]) if scratch is None else scratch.view(-1)
    received = list(room.view(len(parts) - 1, *parts[rank].shape))
    received.insert(rank, parts[rank])
    works = _exchange(parts, received, group)

    def add_up() -> None:
        # Two terms are rounded once in either dtype; with more, partial sums in half precision would be rounded too.
        total = parts[rank].float() if own.dtype in HALF_DTYPES and len(parts) > 2 else parts[rank]  # noqa: PLR2004
        for index, part in enumerate(received):
            if index != rank:
                total = torch.add(total, part, out=own if total.dtype == own.dtype else total)
        own.copy_(total)

    return works, add_up


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Send the i-th tensor to rank i, and receive its into another; nothing to and from this rank itself."""
    works: list[dist.Work | None] = []
    for index, rank in enumerate(dist.get_process_group_ranks(group)):
        if index != dist.get_rank(group):
            works.append(dist.irecv(incoming[index], rank, group, _TAG))
            works.append(dist.isend(outgoing[index], rank, group, _TAG))
    return [work for work in works if work is not None]
