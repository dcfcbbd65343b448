# pyright: reportUnknownMemberType=false
"""Messages from one rank of a pipeline to another, in the order in which the sender works.

See [Note: order of messages] in `colossal._src.pipeline.schedule.p2p_messages`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh, call_within
from colossal._src.comm import LostPeerGuard, count_collective
from colossal._src.pipeline.schedule import P2PMessage
from colossal._src.pipeline.schedule.p2p_messages import RecvOrder
from colossal._src.pipeline.schedule.stage_placement import SharedParameter, StagePlacement
from colossal.accelerator import Accelerator
from colossal.errors import CommunicationError, ShapeError

# [Note: links are opened in one order]
# A backend of an accelerator opens a connection of two ranks when one of them first sends, and blocks the host until
# the other one receives. In the middle of a step no schedule accounts for that wait. So each link is used once before
# the first step, in both directions. All ranks go through the pairs in ascending order: of the pairs that are not open
# yet, the lowest is the next one of both its ranks, so that no cycle of waits can arise.
#
# The messages of a step are not batched, and neither are these: NCCL carries a batch over the connection of the entire
# group, so that a batch here would open another connection than the one that is used later.

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


_SUPPORTED_DTYPES = {*_DTYPES} - {torch.int16, torch.bool}  # by every backend; the bytes of the others are sent


HEADER_LENGTH = 64


class TensorMeta(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool  # whether its gradient goes back

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorMeta":
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def encode_metas(metas: Iterable[TensorMeta]) -> torch.Tensor:
    """Write metas into a tensor that has the same length whatever they are."""
    numbers = [0]
    for shape, dtype, requires_grad in metas:
        if dtype not in _DTYPES:
            raise ShapeError(
                f"Stages of a pipeline send tensors of {', '.join(map(str, _DTYPES))}. Found {dtype}. Convert it "
                "at the end of the stage."
            )
        numbers += [_DTYPES.index(dtype), requires_grad, len(shape), *shape]
        numbers[0] += 1
    if len(numbers) > HEADER_LENGTH:
        raise ShapeError(
            f"What a stage sends is described by {HEADER_LENGTH} numbers. Found {numbers[0]} tensors that need "
            f"{len(numbers)}. Split the model where fewer tensors pass."
        )
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)))


def decode_metas(header: torch.Tensor) -> tuple[TensorMeta, ...]:
    """Read what `encode_metas` wrote."""
    count, *numbers = header.tolist()
    found, place = [], 0
    for _ in range(count):
        dtype, requires_grad, length = numbers[place : place + 3]
        shape = tuple(numbers[place + 3 : place + 3 + length])
        found.append(TensorMeta(shape, _DTYPES[dtype], bool(requires_grad)))
        place += 3 + length
    return tuple(found)


@final
@dataclass
class P2PLink:
    """Both directions between this rank and another one of the pp axis."""

    peer: int  # the global rank of the other one
    sending: dist.ProcessGroup  # the group of messages to it
    receiving: dist.ProcessGroup  # the group of messages from it
    device: torch.device  # where tensors are
    num_sent: int = 0  # messages that were sent, which number them
    num_received: int = 0  # messages for which a receive was posted
    _pending_sends: deque[tuple[dist.Work | None, torch.Tensor]] = field(default_factory=deque)

    def send(self, tensor: torch.Tensor) -> None:
        """Send, without waiting."""
        # Without the graph, which would otherwise live until the message has left.
        tensor = tensor.detach().contiguous()
        count_collective("send", "pp", tensor.nbytes)
        with LostPeerGuard():
            work = dist.isend(_as_supported_dtype(tensor), self.peer, self.sending, tag=self.num_sent)
        # The backend reads the tensor later: it must not be freed or used again before.
        self._pending_sends.append((work, tensor))
        self.num_sent += 1
        while len(self._pending_sends) > 1 and _is_completed(self._pending_sends[0][0]):
            self._pending_sends.popleft()

    def post(self, tensor: torch.Tensor) -> dist.Work | None:
        """Post a receive."""
        with LostPeerGuard():
            work = dist.irecv(_as_supported_dtype(tensor), self.peer, self.receiving, tag=self.num_received)
        self.num_received += 1
        return work

    def drain(self) -> None:
        """Wait until everything has left."""
        while self._pending_sends:
            wait(self._pending_sends.popleft()[0])


def wait(work: dist.Work | None) -> None:
    """Wait for a message."""
    if work is not None:
        with LostPeerGuard():
            work.wait()


def _as_supported_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype that every backend carries."""
    return tensor if tensor.dtype in _SUPPORTED_DTYPES else tensor.view(-1).view(torch.uint8)


def _is_completed(work: dist.Work | None) -> bool:
    return work is None or work.is_completed()


@final
class RecvQueue:
    """What comes from one rank in one step."""

    def __init__(self, link: P2PLink, order: Iterable[P2PMessage], known: dict[int, tuple[TensorMeta, ...]]) -> None:
        self._link, self._order, self._known = link, RecvOrder(order), known
        self._posted: dict[P2PMessage, list[tuple[dist.Work | None, torch.Tensor]]] = {}

    def take(self, message: P2PMessage) -> list[torch.Tensor]:
        """Wait for a message."""
        for each in self._order.take(message, self._known):
            self._post(each)
        parts = self._posted.pop(message)
        for work, _ in parts:
            wait(work)
        return [tensor for _, tensor in parts]

    def _post(self, message: P2PMessage) -> None:
        if message.stage not in self._known:
            # Waited for at once: without the shapes no receive of the tensors themselves can be posted.
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._link.device)
            wait(self._link.post(header))
            self._known[message.stage] = decode_metas(header)
        parts: list[tuple[Any, torch.Tensor]] = []
        for shape, dtype, requires_grad in self._known[message.stage]:
            # The same rule as the sender's: gradients go back only for what requires one.
            if requires_grad or not message.is_grad:
                tensor = torch.empty(shape, dtype=dtype, device=self._link.device)
                parts.append((self._link.post(tensor), tensor))
        self._posted[message] = parts


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
            # All ranks of the axis come here: forming a group is collective.
            _OPENED_LINKS[down] = _OpenedLinks(mesh.blocks("pp", mesh.size("pp"))[0])
        opened_links = _OPENED_LINKS[down]
        up = opened_links.up
    others = [sum(pair) - own for pair in sorted(pairs) if own in pair]
    links = {other: P2PLink(ranks[other], *((down, up) if other > own else (up, down)), device) for other in others}
    if opened_links is not None:
        new = [other for other in others if other not in opened_links.opened]
        open_links([links[other] for other in new], mesh.global_rank, mesh.accelerator, mesh.timeout_seconds)
        # Remembered by the group, as the connections outlast this executor.
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
    # The values are compared by the caller: a link to the wrong rank would give wrong numbers, and no error.
    works: list[dist.Work | None] = []
    for sender in sorted((own, link.peer)):
        if sender == own:
            works.append(dist.isend(hello, link.peer, link.sending))
        else:
            works.append(dist.irecv(answer, link.peer, link.receiving))
    for work in works:
        wait(work)
    return int(answer.item())
