"""Proves of a schedule, without a tensor, that its passes fit its stages and that no rank waits for ever."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import final

from colossal._src.pipeline.schedule.action import ORDER_ADVICE, Action, ActionKind, PipelineOrder
from colossal._src.pipeline.schedule.p2p_messages import (
    P2POperation,
    P2PPrograms,
    Payload,
    describe_payload,
    p2p_programs,
)
from colossal._src.pipeline.schedule.stage_placement import SharedParameter, StagePlacement
from colossal.errors import ConfigError

# [Note: sends that wait]
# A send is taken to hold its rank until the other one has posted the receive. Of all that backends do this is the
# strictest: NCCL's messages wait in a stream for each direction of a pair while the rank goes on, gloo and shared
# memory keep small ones. With fewer waits everything only comes earlier, so a schedule that ends here ends on all.


def check_schedule(orders: PipelineOrder, placement: StagePlacement, shared: Sequence[SharedParameter] = ()) -> None:
    """Prove that a schedule ends, whatever the backend, and that both sides of a link agree on what is sent.

    Every pass has to be made once, after what it needs, by the rank that has its stage. Then the messages of a step
    are simulated: with shapes, as in a first step, and without.
    """
    _check_passes(orders, placement)
    for is_first in (True, False):
        check_programs(p2p_programs(orders, placement, shared, is_first))


def check_programs(programs: P2PPrograms) -> None:
    """Prove that what ranks send and receive fits together, and comes to an end."""
    for source in range(len(programs)):
        for target in range(len(programs)):
            _match(programs, source, target)
    if stuck := _Run(programs).stuck():
        raise ConfigError(
            "Ranks of a pipeline never deadlock in a cycle of waits, and a send waits until its receive is posted. "
            f"Found that {'; '.join(stuck)}. {ORDER_ADVICE}"
        )


def _check_passes(orders: PipelineOrder, placement: StagePlacement) -> None:
    """See that all passes are made, by their rank, each after what it needs of the same rank."""
    if len(orders) != placement.num_ranks:
        raise ConfigError(
            f"A schedule says what each of {placement.num_ranks} ranks does. Found {len(orders)} orders. Make one for "
            "each."
        )
    for rank, order in enumerate(orders):
        done = set[Action]()
        for action in order:
            if action.stage >= placement.num_stages or placement.rank_of(action.stage) != rank:
                raise ConfigError(
                    f"A rank makes the passes of its own stages, which are {list(placement.stages_of(rank))} on rank "
                    f"{rank}. Found {action} among its passes. Use the placement that the schedule was made for."
                )
            if early := [each for each in _needs_here(action, placement) if each not in done]:
                raise ConfigError(
                    f"A pass comes after the passes that it needs. Found that rank {rank} makes {action} before "
                    f"{early[0]}. Put {early[0]} before it."
                )
            done.add(action)
    _check_numbers(orders, placement)


def _needs_here(action: Action, placement: StagePlacement) -> Iterator[Action]:
    """Go through what the same rank has to do before a pass."""
    if action.kind in "BI":
        yield action._replace(kind="F")
    needed = action.needs(placement.num_stages)
    if needed is not None and placement.rank_of(needed.stage) == placement.rank_of(action.stage):
        yield needed


def _check_numbers(orders: PipelineOrder, placement: StagePlacement) -> None:
    """See that every micro-batch passes every stage once: forward, and in training backward, in one part or in two."""
    found = Counter(action for order in orders for action in order)
    kinds, number = {action.kind for action in found}, 1 + max((action.microbatch for action in found), default=-1)
    wanted = "F" if kinds == {"F"} else "FB" if "B" in kinds else "FIW"
    passes: tuple[ActionKind, ...] = ("F", "B", "I", "W")
    expected = [
        Action(kind, stage, microbatch)
        for kind in passes
        for stage in range(placement.num_stages)
        for microbatch in range(number)
    ]
    for action in expected:
        if found[action] != (action.kind in wanted):
            raise ConfigError(
                f"Every micro-batch has the passes {', '.join(wanted)} of every stage once. Found {action} "
                f"{found[action]} times, of {number} micro-batches. "
                f"{'Put it once into the order of its rank' if action.kind in wanted else 'Leave it out'}."
            )


def _match(programs: P2PPrograms, source: int, target: int) -> None:
    """See that one rank receives what another one sends, in the same order."""
    sent = [each.payload for each in programs[source] if (each.kind, each.peer) == ("send", target)]
    received = [each.payload for each in programs[target] if (each.kind, each.peer) == ("post", source)]
    for place, (given, taken) in enumerate(zip_longest(sent, received)):
        if given != taken:
            raise ConfigError(
                f"A rank receives what another one sends, in its order. Found that message {place} from rank {source} "
                f"to rank {target} is {_name(given)} where it is sent, and {_name(taken)} where it is received. "
                f"{ORDER_ADVICE}"
            )


def _name(payload: Payload | None) -> str:
    return "nothing" if payload is None else describe_payload(payload)


@final
class _Run:
    """Ranks that work through their programs until all of them have ended, or none can go on."""

    def __init__(self, programs: P2PPrograms) -> None:
        self._programs = programs
        self._at = [0 for _ in programs]
        self._reached = set[tuple[int, P2POperation]]()
        moved = True
        while moved:
            moved = any(self._advance(rank) for rank in range(len(programs)))

    def stuck(self) -> list[str]:
        """Describe the waits: a cycle, or the ranks up to one that has ended; nothing if all have ended."""
        waiting = {
            rank: program[at]
            for rank, (program, at) in enumerate(zip(self._programs, self._at, strict=True))
            if at < len(program)
        }
        path: list[int] = []
        rank = min(waiting, default=-1)
        # Each rank waits for one other, so following these leads into the cycle, or to a rank that has ended.
        while rank in waiting and rank not in path:
            path.append(rank)
            rank = waiting[rank].peer
        cycle = path[path.index(rank) :] if rank in path else path
        return [f"rank {each} {waiting[each]}" for each in cycle]

    def _advance(self, rank: int) -> bool:
        """Run the operations of a rank that do not block; return whether there were any."""
        program, begin = self._programs[rank], self._at[rank]
        while self._at[rank] < len(program):
            operation = program[self._at[rank]]
            # Before it ends: a send that waits is enough for the peer's wait to end.
            self._reached.add((rank, operation))
            if not self._can_end(rank, operation):
                break
            self._at[rank] += 1
        return self._at[rank] > begin

    def _can_end(self, rank: int, operation: P2POperation) -> bool:
        """A send needs the other's receive, a wait its own receive and the other's send."""
        kind, peer, payload = operation
        if kind == "post":
            return True
        if kind == "send":
            return (peer, P2POperation("post", rank, payload)) in self._reached
        return {
            (rank, P2POperation("post", peer, payload)),
            (peer, P2POperation("send", rank, payload)),
        } <= self._reached
