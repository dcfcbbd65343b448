"""What each rank of a pipeline sends and receives in a step, as data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from colossal._src.pipeline.schedule.action import Action, PipelineOrder
from colossal._src.pipeline.schedule.p2p_messages import (
    P2PMessage,
    RecvOrder,
    message_received_by,
    message_sent_by,
    p2p_messages,
)
from colossal._src.pipeline.schedule.stage_placement import SharedParameter, StagePlacement


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
