"""What ranks of a pipeline send to each other in a step, in which order, and when receives are posted."""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, final

from colossal._src.pipeline.schedule.action import ORDER_ADVICE, Action, PipelineOrder
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
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
        while self._order and len(self._posted) < _AHEAD and self._order[0].stage in known:
            yield self._next()

    def _next(self) -> P2PMessage:
        message = self._order.popleft()
        self._posted.add(message)
        return message
