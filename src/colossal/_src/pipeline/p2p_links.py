# pyright: reportUnknownMemberType=false
"""Links between the ranks of a pipeline that send to each other, opened before the first step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, call_within
from colossal._src.pipeline.p2p import P2PLink, wait
from colossal._src.pipeline.schedule.shared_parameter import SharedParameter
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
from colossal.accelerator import Accelerator
from colossal.errors import CommunicationError

# [Note: links are opened in one order]
# A backend of an accelerator opens a connection of two ranks when one of them first sends, and blocks the host until
# the other one receives. In the middle of a step no schedule accounts for that wait. So each link is used once before
# the first step, in both directions. All ranks go through the pairs in ascending order: of the pairs that are not open
# yet, the lowest is the next one of both its ranks, so that no cycle of waits can arise.
#
# The messages of a step are not batched, and neither are these: NCCL carries a batch over the connection of the entire
# group, so that a batch here would open another connection than the one that is used later.

Pair = tuple[int, int]

_SLACK_SECONDS = 0.5  # for what ends by itself, with a reason of its own


@dataclass
class _OpenedLinks:
    """What the pp axis of a mesh has on an accelerator: the group of messages to earlier ranks, and which are open."""

    up: dist.ProcessGroup
    opened: set[int] = field(default_factory=set)


_OPENED_LINKS: WeakKeyDictionary[Any, _OpenedLinks] = WeakKeyDictionary()


def peer_pairs(placement: StagePlacement, shared: Iterable[SharedParameter] = ()) -> list[Pair]:
    """Find the ranks that send to each other in a step."""
    found = list(pairwise(map(placement.rank_of, range(placement.num_stages))))
    for parameter in shared:
        found += combinations(parameter.ranks(placement), 2)
    return sorted({(min(pair), max(pair)) for pair in found if pair[0] != pair[1]})


def make_links(mesh: ParallelMesh, pairs: Iterable[Pair]) -> dict[int, P2PLink]:
    """Make the links between this rank and others of the pp axis, and open those that are not open yet.

    Communication: on an accelerator, a group of the pp axis is formed when links are made first, and the ranks of each
    pair send 8 bytes to each other when they make a link first.
    """
    own, device, ranks = mesh.rank("pp"), mesh.accelerator.get_current_device(), mesh.ranks("pp")
    down = up = mesh.group("pp")
    opened_links = None
    if mesh.size("pp") > 1 and not mesh.accelerator.is_cpu:
        if down not in _OPENED_LINKS:
            _OPENED_LINKS[down] = _OpenedLinks(mesh.blocks("pp", mesh.size("pp"))[0])
        opened_links = _OPENED_LINKS[down]
        up = opened_links.up
    others = [sum(pair) - own for pair in sorted(pairs) if own in pair]
    links = {other: P2PLink(ranks[other], *((down, up) if other > own else (up, down)), device) for other in others}
    if opened_links is not None:
        new = [other for other in others if other not in opened_links.opened]
        open_links([links[other] for other in new], mesh.global_rank, mesh.accelerator, mesh.timeout_seconds)
        opened_links.opened.update(new)
    return links


def open_links(links: Sequence[P2PLink], own: int, accelerator: Accelerator, seconds: float) -> None:
    """Use each link once, both ways: see [Note: links are opened in one order].

    Communication: send, pp, 8 bytes to each peer, and as much back.
    """
    if not links:
        return
    at = links[0].peer
    index = accelerator.get_current_device().index or 0  # which a thread does not inherit

    def use_all() -> None:
        nonlocal at
        accelerator.set_device(index)
        for link in links:
            at = link.peer
            if (found := _exchange_ranks(link, own)) != link.peer:
                raise RuntimeError(f"it answers as rank {found}.")

    try:
        call_within(seconds + _SLACK_SECONDS, use_all)
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it did not answer."
        raise CommunicationError(
            "Ranks of a pipeline that send to each other open a link before the first step, all of them in the same "
            f"order. Found that ranks {min(own, at)} and {max(own, at)} could not within {seconds:g} s; "
            f"what rank {own} saw of rank {at}: {reason} Look for the first error of rank {at}."
        ) from error


def _exchange_ranks(link: P2PLink, own: int) -> int:
    """Exchange ranks with the peer: the lower rank sends first."""
    hello = torch.tensor([own], device=link.device)
    answer = torch.full_like(hello, -1)
    works: list[dist.Work | None] = []
    for sender in sorted((own, link.peer)):
        if sender == own:
            works.append(dist.isend(hello, link.peer, link.sending))
        else:
            works.append(dist.irecv(answer, link.peer, link.receiving))
    for work in works:
        wait(work)
    return int(answer.item())
