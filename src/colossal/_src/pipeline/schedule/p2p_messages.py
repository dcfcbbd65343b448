"""Which messages ranks of a pipeline exchange, and what each rank sends and receives in a step, as data."""

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from colossal._src.pipeline.schedule.action import ORDER_ADVICE, Action, PipelineOrder
from colossal._src.pipeline.schedule.stage_placement import SharedParameter, StagePlacement
from colossal.errors import ConfigError

# [Note: order of messages]
# Both sides know the schedule of every rank, so both know the order of all messages between two ranks. The receiver
# posts its receives in that order, some of them ahead. Messages to later ranks and to earlier ones have groups of their
# own where a backend carries out the messages between two ranks one after the other.

_AHEAD = 2


class P2PMessage(NamedTuple):
    """Hidden states, or their gradients, of one micro-batch between two adjacent stages."""

    is_grad: bool  # whether it goes back
    stage: int  # the earlier of the two stages
    microbatch: int  # the micro-batch


class PeerMessage(NamedTuple):
    """A message, and the other rank."""

    peer: int  # the rank of the pp axis that sends it or receives it
    message: P2PMessage  # what is sent


def message_received_by(action: Action, placement: StagePlacement) -> PeerMessage | None:
    """Return the message that a pass receives from another rank, if any."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        return _between(stage, stage - 1, P2PMessage(False, stage - 1, microbatch), placement)
    if kind in "BI" and stage < placement.num_stages - 1:
        return _between(stage, stage + 1, P2PMessage(True, stage, microbatch), placement)
    return None


def message_sent_by(action: Action, placement: StagePlacement) -> PeerMessage | None:
    """Return the message that a pass sends to another rank, if any."""
    kind, stage, microbatch = action
    if kind == "F" and stage < placement.num_stages - 1:
        return _between(stage, stage + 1, P2PMessage(False, stage, microbatch), placement)
    if kind in "BI" and stage > 0:
        return _between(stage, stage - 1, P2PMessage(True, stage - 1, microbatch), placement)
    return None


def _between(stage: int, other: int, message: P2PMessage, placement: StagePlacement) -> PeerMessage | None:
    peer = placement.rank_of(other)
    return None if peer == placement.rank_of(stage) else PeerMessage(peer, message)


def p2p_messages(orders: PipelineOrder, placement: StagePlacement, source: int, target: int) -> Iterator[P2PMessage]:
    """Go through the messages of a step from one rank to another, in the order of the sender.

    See [Note: order of messages].
    """
    for action in orders[source]:
        given = message_sent_by(action, placement)
        if given is not None and given.peer == target:
            yield given.message


@final
class RecvOrder:
    """Which receives of the messages of one rank are posted, and when."""

    def __init__(self, order: Iterable[P2PMessage]) -> None:
        self._order, self._posted = deque(order), set[P2PMessage]()

    def take(self, message: P2PMessage, known: Container[int]) -> Iterator[P2PMessage]:
        """Go through the receives that are posted before a rank waits for a message."""
        while message not in self._posted:
            if not self._order:
                raise ConfigError(
                    f"A rank waits for messages that another one sends. Found that no rank sends {message}. "
                    f"{ORDER_ADVICE}"
                )
            yield self._next()
        self._posted.remove(message)
        # Not ahead of a header: without shapes there is nothing to receive into.
        while self._order and len(self._posted) < _AHEAD and self._order[0].stage in known:
            yield self._next()

    def _next(self) -> P2PMessage:
        message = self._order.popleft()
        self._posted.add(message)
        return message


class StageOutputShapes(NamedTuple):
    """The shapes of what leaves a stage."""

    stage: int


Payload = P2PMessage | StageOutputShapes | SharedParameter
"""What is sent: a message, its shapes ahead of the first one, or the gradient of a tied parameter."""


class P2POperation(NamedTuple):
    """One thing that a rank does to a link."""

    kind: Literal["send", "post", "wait"]  # it sends, posts a receive, or waits for what it has posted
    peer: int  # the rank of the pp axis at the other end
    payload: Payload  # what is sent or received

    def __str__(self) -> str:
        verb, direction = {"send": ("sends", "to"), "post": ("receives", "from"), "wait": ("waits for", "from")}[
            self.kind
        ]
        return f"{verb} {describe_payload(self.payload)} {direction} rank {self.peer}"


def describe_payload(payload: Payload) -> str:
    """Name what is sent."""
    if isinstance(payload, StageOutputShapes):
        return f"the shapes after stage {payload.stage}"
    if isinstance(payload, SharedParameter):
        return f"the gradient of {payload.names[0]}"
    what = "gradients" if payload.is_grad else "hidden states"
    return f"the {what} of micro-batch {payload.microbatch} after stage {payload.stage}"


P2PPrograms = tuple[tuple[P2POperation, ...], ...]
"""What each rank does to its links, in its order."""


def p2p_programs(
    orders: PipelineOrder, placement: StagePlacement, shared: Sequence[SharedParameter] = (), is_first: bool = False
) -> P2PPrograms:
    """Find what ranks do to their links in a step."""
    trains = any(action.kind != "F" for order in orders for action in order)
    programs: list[tuple[P2POperation, ...]] = []
    for rank, order in enumerate(orders):
        program = _Program(orders, placement, rank, set() if is_first else set(range(placement.num_stages)))
        for action in order:
            program.do(action)
        for parameter in shared if trains else ():
            program.exchange(parameter)
        programs.append(tuple(program.operations))
    return tuple(programs)


@final
@dataclass
class _Program:
    """What one rank does to its links."""

    orders: PipelineOrder
    placement: StagePlacement
    rank: int
    known: set[int]
    operations: list[P2POperation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._recv_queues = {
            peer: RecvOrder(p2p_messages(self.orders, self.placement, peer, self.rank))
            for peer in range(len(self.orders))
        }

    def do(self, action: Action) -> None:
        """Receive what a pass needs, and send what it makes."""
        taken, given = message_received_by(action, self.placement), message_sent_by(action, self.placement)
        if taken is not None:
            for message in self._recv_queues[taken.peer].take(taken.message, self.known):
                self._post(taken.peer, message)
            self._add("wait", taken.peer, taken.message)
        if action.kind == "F" and action.stage not in self.known:
            self.known.add(action.stage)
            if given is not None:
                self._add("send", given.peer, StageOutputShapes(action.stage))
        if given is not None:
            self._add("send", given.peer, given.message)

    def exchange(self, parameter: SharedParameter) -> None:
        """Exchange the gradients of a parameter, if this rank has it."""
        ranks = parameter.ranks(self.placement)
        others = [rank for rank in ranks if rank != self.rank] if self.rank in ranks else []
        # All receives come before the first send, which may wait until the other rank has posted its own.
        for kind in ("post", "send", "wait"):
            for other in others:
                self._add(kind, other, parameter)

    def _post(self, peer: int, message: P2PMessage) -> None:
        if message.stage not in self.known:
            self._add("post", peer, StageOutputShapes(message.stage))
            self._add("wait", peer, StageOutputShapes(message.stage))
            self.known.add(message.stage)
        self._add("post", peer, message)

    def _add(self, kind: Literal["send", "post", "wait"], peer: int, payload: Payload) -> None:
        self.operations.append(P2POperation(kind, peer, payload))
