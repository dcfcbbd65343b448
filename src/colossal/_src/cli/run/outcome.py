"""How a node ended, which of several failures came first, and why: what the last output of a rank says."""

import re
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import final

from colossal._src._lost_peer import LOST_PEER
from colossal._src.cli.watchdog import ADVICE, is_lost_peer, watchdog_message

_RANK = re.compile(r"\[rank(\d+)\]: (.*)")
_TORCHRUN_FAILED = re.compile(r"E\d{4} .*torch/distributed/elastic/.*failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_TORCH_ITSELF = re.compile(r"[EWI]\d{4} [\d:.]+ \d+ torch/distributed/|\[W\d{4} [\d:.]+ ")
_TABLE_RANK = re.compile(r"\s+rank\s+: (\d+) \(local_rank: \d+\)")
_TABLE_EXIT = re.compile(r"\s+exitcode\s+: (-\d+) .*\((SIG\w+)\)")
_TRACEBACK = "Traceback (most recent call last)"
_ABORTED = "SIGABRT"
_ENDED_BY_US = {"SIGTERM", "SIGINT", "SIGHUP"}
_TAIL_LINES, _RANK_LINES = 60, 200
SHOWN_LINES = 20


class Weight(IntEnum):
    """How likely it is that a failure is only a consequence of another one; the least first."""

    CAUSE = 0
    UNKNOWN = 1
    ECHO = 2


@final
@dataclass(frozen=True)
class Cause:
    """Why a node failed, as far as its output shows."""

    weight: Weight
    since: float
    title: str
    lines: tuple[str, ...]


@final
@dataclass
class FailureDiagnosis:
    """Listens to one node's standard error, and keeps what an explanation needs."""

    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    _raised: dict[int, list[str]] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)
    _killed: list[tuple[int, str, float]] = field(default_factory=list)
    _watchdogs: dict[int, list[str]] = field(default_factory=dict)
    _rank: int = 0
    _over: bool = False

    def add(self, line: str) -> None:
        """Add a line."""
        if message := watchdog_message(line):
            self._add_of_watchdog(*message)
        elif match := _RANK.match(line):
            self._add_of_rank(int(match[1]), match[2])
        elif match := _TABLE_RANK.match(line):
            self._rank = int(match[1])
        elif (match := _TABLE_EXIT.match(line)) and match[2] not in _ENDED_BY_US:
            self._killed.append((self._rank, match[2], time.monotonic()))
        if _TORCHRUN_FAILED.match(line):
            self._over = True  # what follows is torchrun's own report, or another attempt
        if not self._over and not _TORCH_ITSELF.match(line):
            self._tail.append(line)

    def _add_of_rank(self, rank: int, line: str) -> None:
        if self._over and line.startswith(_TRACEBACK):
            for kept in (self._raised, self._since, self._killed, self._watchdogs, self._tail):
                kept.clear()
            self._over = False
        if rank not in self._raised and not line.startswith(_TRACEBACK):
            return
        lines = self._raised.setdefault(rank, [])
        self._since.setdefault(rank, time.monotonic())
        if len(lines) < _RANK_LINES:
            lines.append(line)

    def _add_of_watchdog(self, rank: int | None, message: str) -> None:
        if rank is not None:
            self._watchdogs.setdefault(rank, []).append(message)
            self._since.setdefault(rank, time.monotonic())

    def cause(self) -> Cause:
        """Weigh what is known: an exception of a rank's own, a signal, or only a lost peer."""
        raised = [
            Cause(_weigh(lines), self._since[rank], f"rank {rank} raised", tuple(lines[-SHOWN_LINES:]))
            for rank, lines in self._raised.items()
        ]
        killed = [self._why_killed(*each) for each in self._killed]
        rest = Cause(Weight.UNKNOWN, time.monotonic(), "it printed", tuple(self._tail)[-SHOWN_LINES:])
        return min([*raised, *killed], key=lambda cause: (cause.weight, cause.since), default=rest)

    def _why_killed(self, rank: int, name: str, since: float) -> Cause:
        """Distinguish a rank that died from one whose watchdog ended it because a peer was lost."""
        messages = self._watchdogs.get(rank, [])[:SHOWN_LINES]
        if name != _ABORTED or not messages:
            return Cause(Weight.CAUSE, since, f"rank {rank} was killed by {name}", ())
        if not is_lost_peer(messages):
            title = f"rank {rank} was ended by its watchdog ({name}) after an error of its device"
            return Cause(Weight.CAUSE, self._since[rank], title, tuple(messages))
        title = (
            f"rank {rank} lost a peer, or waited for one longer than the timeout, and its watchdog ended it ({name})"
        )
        return Cause(Weight.ECHO, self._since[rank], title, (*messages, ADVICE))


def _weigh(lines: list[str]) -> Weight:
    return Weight.ECHO if any(LOST_PEER.search(line) for line in lines) else Weight.CAUSE


class Ending(Enum):
    """How a node's part ended."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    ENDED = "ended"


@final
@dataclass(frozen=True)
class NodeEnd:
    """The end of one node's part."""

    node: int
    name: str
    ending: Ending
    status: int
    cause: Cause
    left: tuple[int, ...] = ()

    @property
    def exit_code(self) -> int:
        """What a shell would say: the exit status, or 128 and the number of the signal."""
        return 128 - self.status if self.status < 0 else self.status

    @property
    def place(self) -> str:
        """The node, by name and number."""
        return f"{self.name} (node {self.node})"

    @property
    def sentence(self) -> str:
        """What happened to the node."""
        code = f"failed with exit code {self.status}"
        how = f"was ended by {signal.Signals(-self.status).name}" if self.status < 0 else code
        what = {Ending.DONE: "had finished", Ending.FAILED: how, Ending.LOST: "was lost", Ending.ENDED: "was ended"}
        return f"{self.place} {what[self.ending]}"


def lost(node: int, name: str, reason: str) -> NodeEnd:
    """Return the end of a node that does not answer any more, or never did."""
    cause = Cause(Weight.CAUSE, time.monotonic(), "", (reason,))
    return NodeEnd(node, name, Ending.LOST, 1, cause)


def first_failure(ends: list[NodeEnd]) -> NodeEnd | None:
    """Return the node whose fault it was: the first with a reason of its own, not one that only lost its peers."""
    candidates = [
        end
        for end in ends
        if end.ending in {Ending.FAILED, Ending.LOST}
        or (end.ending is Ending.ENDED and end.cause.weight is Weight.CAUSE)
    ]
    return min(candidates, key=lambda end: (end.cause.weight, end.cause.since), default=None)


def report(ends: list[NodeEnd], interrupted: str | None = None) -> str:
    """Write what a user reads last: what ended the job, the node at fault with its error, then the others."""
    guilty = first_failure(ends)
    if interrupted is not None:
        lines = [f"{interrupted} ended the job on all nodes."]
        others = [end for end in ends if end.ending is Ending.LOST]
    elif guilty is not None:
        what = f"{guilty.place} failed" if guilty.ending is Ending.ENDED else guilty.sentence
        lines = [f"{what}, and so the job was ended on all nodes.", *_detail(guilty.cause)]
        others = [end for end in ends if end is not guilty and end.ending is not Ending.DONE]
    else:
        lines, others = [], []
    lines += [f"{end.sentence}{_aside(end)}" for end in others]
    lines += [f"{end.name} still runs {end.left}, which could not be killed." for end in ends if end.left]
    return "\n".join(lines)


def _detail(cause: Cause) -> list[str]:
    colon = ":" if cause.lines else "."
    return [*([f"{cause.title}{colon}"] if cause.title else []), *(f"    {line}" for line in cause.lines)]


def _aside(end: NodeEnd) -> str:
    if end.ending is Ending.LOST:
        return f": {end.cause.lines[0]}"
    return ", after it had lost a peer" if end.cause.weight is Weight.ECHO else ""
