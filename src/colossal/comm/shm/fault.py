"""Why a group of ranks is broken, in words."""

from collections.abc import Sequence
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
    """Put a fault into words.

    Args:
        kind: The reason.
        detail: What is known of it.
        global_ranks: The rank in the world of each rank of the group.
        pids: Process identifier of each rank of the group.
        seconds: The timeout of the wait that ended.
        collective: What was waited for; None for a message.

    Returns:
        The error to raise.
    """
    what = "A message needs both its ranks" if collective is None else "A collective needs all ranks of its group"
    guilty = _join([f"rank {global_ranks[rank]}" for rank in detail.ranks])
    processes = _join([f"process {pids[rank]}" for rank in detail.ranks])
    origin, target = global_ranks[detail.origin], global_ranks[detail.target]
    texts = {
        FaultKind.TIMEOUT: f"{what} within {seconds:g} s. Found that {guilty} did not come. Look for what was done "
        "there instead, or pass a larger timeout to launch.",
        FaultKind.DEAD: f"{what}. Found that {guilty} ({processes}) has ended. Look for the first error there.",
        FaultKind.LEFT: f"{what}. Found that {guilty} has left the group. Look for an error there, or for a collective "
        "that only some ranks call.",
        FaultKind.MISMATCH: "All ranks of a group must call the same collective with the same sizes and dtype. Found "
        f"{_by_call(detail.calls, global_ranks)}. Look for a branch or a shape that depends on the rank.",
        FaultKind.SPLITS: "What a rank sends must be what the other expects. Found that rank "
        f"{origin} sends {detail.sent_bytes} bytes to rank {target}, which expects {detail.expected_bytes}. "
        "Exchange the sizes first.",
        FaultKind.MESSAGE: "What a rank sends must be what the other expects. Found that rank "
        f"{origin} sent {detail.sent_bytes} bytes of {detail.sent_dtype} with tag {detail.tag} to rank {target}, which "
        f"expects {detail.expected_bytes} bytes of {detail.expected_dtype}. Send and receive tensors of one shape and "
        "dtype.",
        FaultKind.CLOSED: f"{what}. Found that this rank has left it. Communicate before destroy_process_group().",
    }
    return CommunicationError(texts.get(kind, f"{what}. Found that it is broken. Look for the first error."))


def _by_call(calls: Sequence[str], global_ranks: Sequence[int]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, call in zip(global_ranks, calls, strict=True):
        ranks.setdefault(call, []).append(str(rank))
    return ", but ".join(f"{call} on rank{'s' * (len(who) > 1)} {_join(who)}" for call, who in ranks.items())


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
