"""Error messages for a process group that is broken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from colossal.errors import CommunicationError


class FaultKind(IntEnum):
    """The reasons, as the library numbers them."""

    NONE = 0
    TIMEOUT = 1
    DEAD = 2
    LEFT = 3
    MISMATCH = 4
    SPLITS = 5
    MESSAGE = 6
    CLOSED = 7


@dataclass(frozen=True)
class Detail:
    """What is known of a fault; ranks are those of the group."""

    own: int
    finder: int  # the rank that waited, or saw it first
    ranks: list[int]
    calls: list[str]
    origin: int
    target: int
    tag: int
    sent_bytes: int
    expected_bytes: int
    sent_dtype: str
    expected_dtype: str


def explain(
    kind: FaultKind,
    detail: Detail,
    global_ranks: Sequence[int],
    pids: Sequence[int],
    seconds: float,
    collective: IntEnum | None,
) -> CommunicationError:
    """Return the error that describes a fault."""
    needed = "A message needs both its ranks" if collective is None else "A collective needs all ranks of its group"
    found = _found(kind, detail, global_ranks, pids)
    if kind is FaultKind.MISMATCH:
        needed = "All ranks of a group must call the same collective with the same sizes and dtype"
    elif kind in (FaultKind.SPLITS, FaultKind.MESSAGE):
        needed = "What a rank sends must be what the other expects"
    elif kind is FaultKind.TIMEOUT:
        needed += f" within {seconds:g} s"
    advice = _ADVICE_TO_LATE_RANK if _is_late(kind, detail) else _ADVICE[kind]
    return CommunicationError(f"{needed}. Found that {found}. {advice}")


def _is_late(kind: FaultKind, detail: Detail) -> bool:
    """Return whether this rank is told of a timeout that others had because of it."""
    return kind is FaultKind.TIMEOUT and detail.own in detail.ranks


_ADVICE_TO_LATE_RANK = (
    "Look for what this rank did instead, or which rank it waited for itself, or pass a larger timeout to launch."
)


_ADVICE = {
    FaultKind.NONE: "Look for the first error.",
    FaultKind.TIMEOUT: "Look for what was done there instead, or pass a larger timeout to launch.",
    FaultKind.DEAD: "Look for the first error there.",
    FaultKind.LEFT: (
        "Look for an error there, or for a collective that only some ranks call, as in a loop in which one rank has a "
        "batch more: give all ranks as many, by a DistributedSampler or drop_last=True."
    ),
    FaultKind.MISMATCH: "Look for a branch or a shape that depends on the rank.",
    FaultKind.SPLITS: "Exchange the sizes first.",
    FaultKind.MESSAGE: "Send and receive tensors of one shape and dtype.",
    FaultKind.CLOSED: "Communicate before destroy_process_group().",
}


def _found(kind: FaultKind, detail: Detail, global_ranks: Sequence[int], pids: Sequence[int]) -> str:
    guilty = _join([f"rank {global_ranks[rank]}" for rank in detail.ranks])
    others = [f"rank {global_ranks[rank]}" for rank in detail.ranks if rank != detail.own]
    origin, target = global_ranks[detail.origin], global_ranks[detail.target]
    texts: dict[FaultKind, Callable[[], str]] = {
        FaultKind.NONE: lambda: "it is broken",
        FaultKind.TIMEOUT: lambda: (
            f"rank {global_ranks[detail.finder]} waited for {_join(['this rank', *others])}"
            if _is_late(kind, detail)
            else f"{guilty} did not come"
        ),
        FaultKind.DEAD: lambda: f"{guilty} ({_join([f'process {pids[rank]}' for rank in detail.ranks])}) has ended",
        FaultKind.LEFT: lambda: f"{guilty} has left the group",
        FaultKind.MISMATCH: lambda: _by_call(detail.calls, global_ranks),
        FaultKind.SPLITS: lambda: (
            f"rank {origin} sends {detail.sent_bytes} bytes to rank {target}, which expects {detail.expected_bytes}"
        ),
        FaultKind.MESSAGE: lambda: (
            f"rank {origin} sent {detail.sent_bytes} bytes of {detail.sent_dtype} with tag {detail.tag} to rank "
            f"{target}, which expects {detail.expected_bytes} bytes of {detail.expected_dtype}"
        ),
        FaultKind.CLOSED: lambda: "this rank has left it",
    }
    return texts[kind]()


def _by_call(calls: Sequence[str], global_ranks: Sequence[int]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, call in zip(global_ranks, calls, strict=True):
        ranks.setdefault(call, []).append(str(rank))
    return ", but ".join(f"rank{'s' * (len(who) > 1)} {_join(who)} called {call}" for call, who in ranks.items())


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
